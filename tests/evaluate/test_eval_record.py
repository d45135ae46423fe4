"""What `eval` leaves behind: score files that `scores add` and `publish` take, and when there are
none."""

from pathlib import Path

import pytest
from cli_output import parsed
from measured_artifacts import gpqa, write_scores
from recorder import Recorder
from tiny_models import write_model

import oscar_zoo
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.cli.main import run
from oscar_zoo.registry import score_file
from oscar_zoo.registry.score_file import ScoreFile

TEXT = (Path(__file__).resolve().parents[2] / "examples/text/validation.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("STATE", "DATA", "CACHE"):
        monkeypatch.setenv(f"OSCAR_ZOO_{name}", str(tmp_path / name.lower()))
    (tmp_path / "text.txt").write_text(TEXT[:6000])
    return tmp_path / "state"


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """An artifact without data: nothing was measured when it was made."""
    made = oscar_zoo.compute_artifact(
        model, method="hadamard", calib_data=str(tmp_path / "text.txt"), output=tmp_path / "made"
    )
    return made.path


@pytest.fixture
def words(folder: Path, model: Path, tmp_path: Path) -> list[str]:
    """The command line that measures `folder`."""
    sizes = ["--task", "perplexity", "--windows", "2", "--length", "64"]
    return ["eval", str(folder), "--model", str(model), "--data", f"{tmp_path}/text.txt", *sizes]


def measure(what: object, model: Path, tmp: Path, notes: Recorder, n: int = 2) -> Path | None:
    """The same from Python: where scores were kept."""
    size = {"tasks": ("perplexity",), "windows": n, "length": 64, "data": tmp / "text.txt"}
    return oscar_zoo.evaluate_artifact(what, model=model, observer=notes, **size).record  # type: ignore[arg-type]


def test_a_folder_of_the_user_gets_the_scores_and_publishing_takes_them(
    folder: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 0
    assert f"Scores: {folder}/scores.json" in capsys.readouterr().out.splitlines()
    file = score_file.load(folder / "scores.json")
    (score,) = file.scores
    assert score.baseline is not None and score.paired is not None and score.stderr is not None
    assert (score.task, score.n, score.repeats, score.hardware) == ("perplexity", 2, 1, "CPU")
    assert score.source is not None and "--data FILE" in score.source
    assert str(tmp_path) not in (folder / "scores.json").read_text(), "no path of this machine"
    assert oscar_zoo.verify(folder).digest == file.digest
    hub = f"file:{tmp_path}/hub"
    oscar_zoo.publish(folder, hub=hub, create=True, unmeasured=True)
    (known,) = oscar_zoo.scores("tiny", hub=hub)
    assert known.scores == file.scores


def test_measuring_again_changes_nothing_and_other_clips_stand_beside(
    folder: Path, words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "scores.json"
    assert run([*words, "--json"]) == 0
    assert parsed(capsys.readouterr().out)["record"] == str(path)
    before = path.read_bytes()
    assert run([*words, "-q"]) == 0
    assert path.read_bytes() == before
    notes = Recorder()
    assert {measure(folder, model, tmp_path, notes, n) for n in (2, 1)} == {path}
    assert (notes.codes.count("eval.earlier_stands"), score_file.load(path).scores[0].n) == (1, 2)
    # The recipe's own values are no change.
    windows = ["--sink", "4", "--recent", "16", "--clip", "0.96,0.92"]
    assert run([*words, "-q", "--clip", "0.9,0.8"]) == run([*words, "-q", *windows]) == 0
    scores = score_file.load(path).scores
    changes = [{}, {"clip": "0.9,0.8"}, {"sink": "4", "recent": "16"}]
    assert sorted((one.recipe_changes for one in scores), key=changes.index) == changes
    assert any(str(one.source).endswith(" --sink 4 --recent 16") for one in scores)


def test_an_artifact_that_was_named_is_recorded_in_the_state_folder(
    folder: Path, model: Path, tmp_path: Path, state: Path
) -> None:
    hub = f"file:{tmp_path}/hub"
    oscar_zoo.publish(folder, hub=hub, create=True, unmeasured=True)
    pulled = oscar_zoo.pull("tiny", hubs=hub)
    places = [measure(what, model, tmp_path, Recorder()) for what in ("tiny", pulled.path)]
    path = score_file.in_state(ArtifactId.parse(str(pulled.id)))
    assert places == [path, path] and path.is_relative_to(state)
    assert not list(pulled.path.glob("scores*")), "the store never changes"
    (known,) = oscar_zoo.scores("tiny", hub=hub)
    assert known.own == score_file.load(path).scores and not known.scores


def test_what_is_about_another_model_or_cannot_be_kept_is_not_recorded(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    notes, path = Recorder(), folder / "scores.json"
    other = write_model(tmp_path / "other", layers=2, kv_heads=2, heads=2)
    assert measure(folder, other, tmp_path, notes) is None
    path.write_text("mine")
    assert measure(folder, model, tmp_path, notes) is None
    assert notes.codes.count("eval.no_record") == 2
    assert path.read_text() == "mine"


def test_scores_of_bytes_that_are_gone_make_room(folder: Path, model: Path, tmp_path: Path) -> None:
    path = folder / "scores.json"
    first = measure(folder, model, tmp_path, Recorder())
    file = score_file.load(path)
    old = "sha256:" + "0" * 64
    write_scores(path, gpqa(old), digest=old, artifact=file.artifact_id)
    assert measure(folder, model, tmp_path, Recorder()) == first == path
    assert [score.task for score in score_file.load(path).scores] == ["perplexity"]
    more = ScoreFile.of(file.artifact_id, file.digest, (gpqa(file.digest),))
    assert [s.task for s in score_file.keep(path, more).scores] == ["perplexity", "gpqa_diamond"]
