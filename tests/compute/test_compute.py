"""The verb `compute`: its defaults have one place, and the observer hears what people must know."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from architectures import write_architecture
from recorder import Recorder
from tiny_models import EXAMPLE, write_model

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.verbs import verb
from oscar_zoo.compute.compute import CALIB_TOKENS, compute_artifact, plan_job, run
from oscar_zoo.compute.methods.table import TABLE
from oscar_zoo.compute.obtain import plan_computing
from oscar_zoo.compute.options import AUTO
from oscar_zoo.compute.params import ComputeCommand, ComputeParams, MethodName
from oscar_zoo.errors import ArtifactNotFound, HubUnreachable, UsageError
from oscar_zoo.observer import SILENT
from oscar_zoo.registry.targets import ComputeWish, choose_model

NOBODY = ArtifactNotFound("nobody has it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_command_line_has_the_defaults_of_python() -> None:
    given = inspect.signature(compute_artifact).parameters
    with verb("compute").make_context("compute", ["a-model"]) as context:
        typed = dict(context.params)
    for name, parameter in given.items():
        if name not in ("model", "observer", "tune"):
            assert typed[name] == parameter.default, name
    for no_tune in (False, True):
        assert ComputeCommand(model="a-model", no_tune=no_tune).given().tune is not no_tune


def test_the_methods_are_those_of_the_table() -> None:
    publishable = {name for name, row in TABLE.items() if row.publishable}
    assert {*get_args(MethodName)} == publishable and AUTO not in publishable


def test_what_a_request_leaves_open_is_decided_once(model: Path) -> None:
    job, _ = plan_job(ComputeParams(str(model)), choose_model(model))
    assert (job.model_name, job.model_id, job.calib_tokens) == ("tiny", "tiny", CALIB_TOKENS)
    assert (job.method, job.clip, job.tune, job.recipe.group_size) == ("auto", None, True, 16)
    given = ComputeParams(str(model), clip=Clip(k=0.5, v=0.6), group_size=8, device="cpu")
    job, _ = plan_job(given, choose_model(model))
    assert (job.recipe.clip.k, job.recipe.clip.v) == (0.5, 0.6)
    assert (job.recipe.group_size, job.device) == (8, "cpu")


def test_an_observer_hears_phases_and_remarks_are_in_results(model: Path, tmp_path: Path) -> None:
    seen = Recorder()
    request = ComputeParams(
        str(model), calib_tokens=256, method="oscar", output=tmp_path / "out", resume=True
    )
    result = run(request, seen)
    assert result is not None and result.path == tmp_path / "out"
    begun, ended = seen.phases
    assert begun == ("load", "capture", "fit", "write") and ended == ()
    assert list(dict.fromkeys(label for label, _ in seen.progress)) == list(begun)
    texts = [note.text for note in seen.notes]
    assert any("nothing to go on from" in text for text in texts)
    assert list(result.notes) == texts and any("tokens are few" in text for text in texts)


def test_a_model_that_serve_refuses_is_remarked_on_before_it_is_loaded(tmp_path: Path) -> None:
    folder = write_architecture("llama4_text", tmp_path / "chunked")
    seen = Recorder()
    run(ComputeParams(str(folder), method="hadamard", output=tmp_path / "out"), seen)
    assert seen.codes[:1] == ["compute.not_served"]


def test_a_plan_says_what_would_be_done(model: Path) -> None:
    wish = ComputeWish(compute=True, calib_data=str(EXAMPLE.parents[1] / "text/calibration.txt"))
    plan = plan_computing(choose_model(model), wish, NOBODY, SILENT)
    facts = plan.facts
    assert (facts["model"], facts["tokens"], facts["device"]) == ("tiny", CALIB_TOKENS, "cpu")
    assert facts["data"] == wish.calib_data and facts["fetched_bytes"] is None
    assert plan.seconds is not None and facts["seconds"] == plan.seconds > 0


def test_a_hub_that_does_not_answer_is_told_of_before_computing(model: Path) -> None:
    seen, error = Recorder(), HubUnreachable.for_hub("hf:org/zoo", "connection refused")
    plan_computing(choose_model(model), ComputeWish(compute=True), error, seen)
    assert [note.text for note in seen.notes] == [error.message]


def test_a_wish_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="--compute"):
        ComputeWish(calib_data="text.txt").check()
    ComputeWish(compute=True, calib_data="text.txt").check()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (("org/absent",), 5),
        ((str(EXAMPLE), "--calib-data", "absent.txt"), 3),
        ((str(EXAMPLE), "--output-dir", "taken"), 7),
    ],
)
def test_a_mistake_is_told_without_torch(
    wrong: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch and transformers takes seconds, and many more from a slow disk."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("taken").mkdir()
    Path("taken/notes.txt").touch()
    run = "from oscar_zoo.cli.main import run; print(run(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", f"import sys; {run}", "compute", *wrong]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{code} False\n", done.stderr
