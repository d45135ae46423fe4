"""Computing where nobody has an artifact, through `pull`, `serve` and `compute`: what is offered,
what is left behind, and what Ctrl-C and SIGTERM keep."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cli_child import Cli as Child
from cli_child import Finished
from cli_output import Cli, parsed
from engines import INSTALLED, needs_sglang
from forked_commands import QuickCli
from forked_process import ForkedProcess
from raw_server import closed_port
from safetensors.torch import load_file, save_file
from terminal import Terminal
from tiny_artifacts import artifact_files
from tiny_models import change_config

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.compute.capture import checkpoint
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.targets import check_made_for, choose_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # minutes beside other processes
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-qwen3-hard"
NAME = "tiny-qwen3-hard"
TEXT = (ROOT / "examples" / "text" / "calibration.txt").read_text("utf-8")[:36_000]
"""Less would leave no held-out sequence that is longer than both windows."""
COMPUTE = ["compute", str(MODEL), "--method", "oscar", "--calib-tokens", "600"]
COMPUTE += ["--seq-len", "200", "--output-dir"]
SHORT = "one-layer"
"""Another model, which is measured in a quarter of the time."""


class Made(NamedTuple):
    """One state in which an artifact was computed: after an interrupt, beside a damaged state, by
    one of two."""

    cli: Child
    model: Path
    text: Path
    interrupted: Finished
    left: list[str]
    both: list[dict[str, Any]]

    @property
    def computed(self) -> dict[str, Any]:
        return next(row for row in self.both if row["computed"])


def results(cli: Child) -> list[str]:
    """Every file of an artifact that anybody could find."""
    places = [cli.folder / name for name in ("data", "cache/artifacts", "cache/blobs")]
    return [str(path) for place in places for path in place.rglob("*") if path.is_file()]


def first_layer(folder: Path) -> Path:
    """The example model without its other layers, in float32, because many processors multiply
    bfloat16 at a fifth of the speed: its artifact is real, its text is not."""
    shutil.copytree(MODEL, folder)
    change_config(folder, num_hidden_layers=1, torch_dtype="float32")
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: weight.float()
        for name, weight in weights.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(cli: Child, *arguments: str) -> ForkedProcess | subprocess.Popen[str]:
    """Start a command, as a fork of a process that has imported torch where SGLang is installed."""
    if not INSTALLED:
        return cli.start(*arguments)
    return ForkedProcess(["-m", "oscar_zoo", *arguments], cli.variables, cli.folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text.txt"
    text.write_text(TEXT)
    model = first_layer(folder / SHORT)
    cli = QuickCli({**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, folder)
    wanted = ("pull", str(model), "--compute", "--calib-data", str(text))
    first = start(cli, *wanted)
    while not (found := list(folder.glob("cache/computing/*/rotation.work/*"))):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)  # until the model is loaded and the capture begins
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=300)
    left = results(cli)
    found[0].mkdir(parents=True, exist_ok=True)
    (found[0] / "state.json").write_text("{}")  # of another version: nothing to go on from
    children = [start(cli, *wanted, "--json") for _ in range(2)]
    told = [child.communicate(timeout=1500) for child in children]
    assert [child.returncode for child in children] == [0, 0], told
    both = [parsed(out)["artifacts"][0] for out, _ in told]
    return Made(cli, model, text, Finished(first.returncode, out, err), left, both)


def test_ctrl_c_leaves_no_artifact_and_a_second_run_ends(made: Made) -> None:
    first, *_ = made.interrupted.err.splitlines()
    assert "16,384 tokens" in first and str(made.text) in first and " on cpu: about " in first
    assert "nothing to go on from" not in made.interrupted.err
    assert made.interrupted.code == 130 and not made.interrupted.out
    assert made.left == []
    assert not [path for path in (made.cli.folder / "cache/computing").iterdir() if path.is_dir()]


def test_of_two_processes_one_computes(made: Made) -> None:
    assert sorted(row["computed"] for row in made.both) == [False, True]
    assert len({(row["id"], row["digest"], row["path"]) for row in made.both}) == 1


def test_it_is_told_as_any_pull(made: Made) -> None:
    row, other = made.computed, next(row for row in made.both if not row["computed"])
    assert set(row) >= set(other)
    assert row["id"].startswith(f"{SHORT}/seq") and not row["already_present"]
    assert Path(row["path"], FILE_NAME).is_file()
    assert row["hub"] == f"file:{made.cli.folder / 'data' / 'zoo'}"
    assert Path(row["report"]).is_file() and Path(row["moments"]).is_file()
    manifest = Manifest.from_bytes(Path(row["path"], FILE_NAME).read_bytes())
    assert manifest.fit.calibration is not None and manifest.fit.calibration.dataset == "text.txt"
    assert manifest.fit.selection is not None


def test_every_command_finds_it_by_name_without_network(made: Made) -> None:
    cli, row = made.cli, made.computed
    for wanted in (SHORT, str(made.model), row["id"].replace("/", ":")):
        pulled = cli("pull", wanted, "--offline", "--json").json["artifacts"][0]
        assert (pulled["digest"], pulled["already_present"]) == (row["digest"], True)
    again = cli("pull", SHORT, "--compute", "--json").json["artifacts"][0]
    assert (again["digest"], again["computed"]) == (row["digest"], False)
    elsewhere = cli(
        "pull", SHORT, "--no-lock", "--json", OSCAR_ZOO_CACHE=str(cli.folder / "other-cache")
    )
    assert elsewhere.json["artifacts"][0]["digest"] == row["digest"]
    listed = cli("list", "--offline", "--json").json["artifacts"]
    assert [one["status"] for one in listed if one["id"] == row["id"]] == ["installed"]
    assert cli("verify", SHORT, "--strict").code == 0


@needs_sglang
def test_serve_finds_it_by_name(made: Made, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty key is found out after the artifact was opened and fitted to its model."""
    for name, value in made.cli.variables.items():
        if name.startswith("OSCAR_ZOO_"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(made.cli.folder)
    key = made.cli.folder / "key"
    key.write_text("\n")
    model = made.model
    for what in ([SHORT, "--model", model], [model], [model, "--compute"]):
        line = cli.refused(2, "serve", *what, "--expose", "127.0.0.1", "--api-key-file", key)
        assert "one line with a key" in line


def test_the_next_step_is_a_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OSCAR_ZOO_PORT")
    monkeypatch.setenv("OSCAR_ZOO_HUB", f"file:{tmp_path}")  # which answers
    for wanted, shown in ((NAME, "FOLDER"), ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"), (MODEL, MODEL)):
        assert cli.refused(3, "pull", wanted).endswith(f"oscar-zoo pull {shown} --compute\n")
    serve = cli.refused(3, "serve", NAME, "--model", MODEL, "--print")
    assert serve.endswith(f"oscar-zoo serve {NAME} --model {MODEL} --print --compute\n")


def test_without_a_network_only_a_model_that_is_here_is_offered(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache, commit = tmp_path / "models--Qwen--Qwen3-8B", "0" * 40
    for here in (False, True):
        for command in ("pull", "serve"):
            hint = cli.json(5, command, "Qwen3-8B", "--offline")["error"]["hint"]
            assert ("--compute" in hint) == here and "run it without --offline" in hint
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "refs/main").write_text(commit)
        snapshot = cache / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')


def test_what_cannot_be_computed_is_not_offered(cli: Cli) -> None:
    tag, digest = f"{NAME}:seq1_prompt1_group64", f"{NAME}@sha256:{'0' * 64}"
    for wanted, code in (("qwen3-7b", 3), (tag, 5), (digest, 5)):  # a hub may have both
        for more in ([], ["--compute"]):
            assert "--compute" not in cli.refused(code, "pull", wanted, *more)


def test_a_folder_without_weights_is_refused_before_a_word(cli: Cli, tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    for words in (["pull", tmp_path], ["serve", tmp_path, "--print", "--device", "cuda"]):
        err = cli.refused(1, *words, "--compute")
        assert "has no *.safetensors weights" in err and "Computing one" not in err


def test_computing_is_offered_for_a_folder_that_nobody_knows(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can have published anything under its name, so fetching it alone is no way on."""
    shutil.copytree(MODEL, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    line = cli.refused(3, "pull", "./mine", "--offline")
    assert line.endswith("oscar-zoo pull ./mine --compute --offline\n")
    line = cli.refused(3, "serve", "./mine", "--print", "--device", "cpu", "--offline")
    assert "oscar-zoo serve ./mine " in line and "--compute" in line


def test_a_plan_costs_nothing(cli: Cli, own_state: Path) -> None:
    assert " on cpu: about " in cli(0, "pull", MODEL, "--compute", "--dry-run")
    assert not [path for path in own_state.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_hub_that_does_not_answer_is_told_of(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact may be there after all; nobody listens on this port."""
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with closed_port() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        words = ("pull", MODEL, "--hub", "hf:org/zoo")
        again = f"oscar-zoo pull {MODEL} --compute --hub hf:org/zoo\n"
        assert cli.refused(5, *words).endswith(again)
        assert "Would compute" in cli(0, *words, "--compute", "--dry-run")
    assert "note: Hugging Face org/zoo " in cli.err


@needs_sglang
def test_serve_offers_it_without_a_terminal(cli: Cli) -> None:
    again = f"oscar-zoo serve {MODEL} --port {os.environ['OSCAR_ZOO_PORT']} --compute\n"
    assert cli.refused(5, "serve", MODEL).endswith(again)


@needs_sglang
def test_serve_asks_on_a_terminal(tmp_path: Path) -> None:
    """Nothing is computed after a no; standard input and error are a terminal."""
    cli = Child({**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "dumb"}, tmp_path)
    with Terminal(["-m", "oscar_zoo", "serve", MODEL], cli.variables, cwd=tmp_path) as terminal:
        terminal.see("[Y/n]")
        terminal.press(b"n\n")
        assert terminal.end() == 5
    said = terminal.text.splitlines()[-1]
    assert f"No artifact for {NAME} exists. Compute one now (about " in terminal.seen
    assert said.startswith(f"error: nothing was computed for {NAME}. Compute one: oscar-zoo serve ")
    assert said.endswith(" --compute") and str(MODEL) in said
    assert results(cli) == []


def test_two_folders_of_one_name_are_two_models(tmp_path: Path) -> None:
    """A name that the zoo knows means one model; any other folder is known by its configuration."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    made_for = Manifest.from_bytes(artifact_files()[FILE_NAME])

    def of(config: str) -> Manifest:
        block = made_for.model.model_copy(update={"config_sha256": sha256_hex(config.encode())})
        return made_for.model_copy(update={"model": block})

    choice = choose_model(folder)
    check_made_for(choice, of("{}"))
    check_made_for(choice, None)
    check_made_for(choose_model(MODEL), of("another"))
    with pytest.raises(UsageError, match=r"another model than .*checkpoint"):
        check_made_for(choice, of("another"))


@pytest.fixture
def ends_at_first_save(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A capture that saves after every part; after the first, this process gets the signal in the
    dictionary, if there is one."""
    sent: dict[str, int] = {}
    save = checkpoint.Checkpoint.save

    def then_a_signal(self: checkpoint.Checkpoint, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        if "signal" in sent:
            os.kill(os.getpid(), sent["signal"])

    monkeypatch.setattr(checkpoint, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0)
    monkeypatch.setattr(checkpoint.Checkpoint, "save", then_a_signal)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    yield sent
    signal.signal(signal.SIGTERM, before)


def test_what_is_kept_is_named_and_the_same_command_goes_on(
    ends_at_first_save: dict[str, int], tmp_path: Path, cli: Cli
) -> None:
    work = tmp_path / "out.work"
    typed = [*COMPUTE, str(tmp_path / "out")]
    for number in (signal.SIGINT, signal.SIGTERM):
        ends_at_first_save["signal"] = number
        cli(128 + number, *typed)
        told = cli.err
        assert ("went on from" in told) is False  # it was interrupted again
        line = next(line for line in told.splitlines() if line.startswith("error: "))
        assert f"is kept in {work}; the same command " in line and work.is_dir()
    ends_at_first_save.clear()
    cli(0, *typed)
    assert "went on from" in cli.err and not work.exists()


def test_new_text_is_refused(ends_at_first_save: dict[str, int], tmp_path: Path, cli: Cli) -> None:
    typed = [*COMPUTE, str(tmp_path / "out")]
    ends_at_first_save["signal"] = signal.SIGINT
    cli(130, *typed)
    kept = (tmp_path / "out.work/capture/state.json").read_bytes()
    ends_at_first_save.clear()
    text = MODEL.parents[1] / "text/validation.txt"
    cli(7, *typed, "--calib-data", text, "--resume")
    assert "holds a capture of another calibration text" in cli.err and "--no-resume" in cli.err
    assert (tmp_path / "out.work/capture/state.json").read_bytes() == kept


def test_the_same_command_goes_on_and_another_one_begins_anew(
    ends_at_first_save: dict[str, int], tmp_path: Path, cli: Cli
) -> None:
    """The same bytes come out in all cases."""
    typed = [*COMPUTE, str(tmp_path / "out"), "--force"]
    digests = set()
    for interrupted, again, told in (
        (typed, typed, "went on from"),
        (typed, [*typed, "--no-resume"], ""),
        ([*typed, "--seed", "3"], typed, "replaced"),
    ):
        ends_at_first_save["signal"] = signal.SIGINT
        cli(130, *interrupted)
        ends_at_first_save.clear()
        found = cli.json(0, *again)
        notes = " ".join(found["notes"])
        assert told in notes and ("went on from" in notes) == (told == "went on from")
        digests.add(found["digest"])
    assert len(digests) == 1


def test_what_is_short_and_where_it_goes_is_said_before_the_work(cli: Cli) -> None:
    cli(0, "compute", MODEL, "--method", "oscar", "--calib-tokens", "300")
    told = cli.err.splitlines()
    began = next(number for number, line in enumerate(told) if line.startswith("capture"))
    for words in ("the artifact goes into", "tokens are few"):
        assert [number < began for number, line in enumerate(told) if words in line] == [True]


TWICE = """
import atexit, sys, time
from oscar_zoo.cli import main

def interrupted(arguments):
    print("told")
    return main.INTERRUPTED

atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
main.run = interrupted
main.main()
"""


def test_what_was_interrupted_ends_without_what_libraries_do_at_exit() -> None:
    """A second Ctrl-C there would show a traceback of theirs, or abort in a thread of theirs."""
    ended = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "told\n", "")


@needs_sglang
@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_serve_computes_in_front_wherever_the_server_goes(
    ends_at_first_save: dict[str, int], own_state: Path, cli: Cli, more: list[str]
) -> None:
    """Only the server goes into the background: the messages and Ctrl-C are the same."""
    ends_at_first_save["signal"] = signal.SIGINT
    typed = ["serve", str(MODEL), "--compute", "--offline", "--device", "cpu", *more]
    cli(130, *typed, "--", "--oscar-k-clip=0.9x3")  # no server starts with this flag
    told = cli.err
    assert "No artifact for tiny-qwen3-hard was found. Computing one: " in told
    assert "Ctrl-C stops it; the same command continues from there." in told
    assert "is kept in " in told
    assert list(own_state.glob("cache/computing/*/rotation.work/*"))
    assert not list(own_state.glob("state/logs/*"))
