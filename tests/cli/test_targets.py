"""A name is a name and a folder is written as one; what lies in the current folder decides
nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_output import parsed
from engines import needs_sglang
from measured_artifacts import measured_files
from tiny_artifacts import artifact_files, write_folder

import oscar_zoo
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.cli.main import run
from oscar_zoo.cli.render.progress import TerminalObserver
from oscar_zoo.errors import ArtifactNotFound, PathNotFound, UsageError
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.targets import choose_model, parse_model

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
NAME, TAG = "tiny-qwen3-hard", "seq512_prompt2_group64"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an artifact where `compute` writes it, which is not the one in the
    store."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / NAME / TAG, measured_files(seed=1))
    return tmp_path


@pytest.fixture
def stored() -> str:
    """The digest of the artifact of that name in the store."""
    return Store().put(ArtifactId(NAME, TAG), artifact_files(), source="test").record.digest


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Digest of the one artifact that `verify` checks, and what it says on stderr."""
    assert run(["verify", *arguments]) == 0
    done = capsys.readouterr()
    return done.out.rpartition("digest         ")[2].split()[0], done.err


def failure(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert run(list(arguments)) == code
    done = capsys.readouterr()
    assert done.out == "" and done.err.count("\n") == 1, done
    return done.err


@pytest.mark.parametrize("name", [NAME, f"{NAME}/{TAG}"])
def test_a_name_wins_over_a_folder_and_a_note_says_so(
    capsys: pytest.CaptureFixture[str], here: Path, stored: str, name: str
) -> None:
    digest, said = verified(capsys, name)
    assert digest == stored
    assert said == f"note: {name} is taken as a name; the folder of that name is ./{name}\n"
    assert isinstance(oscar_zoo.verify(name), Verified)
    for path in (f"./{name}", f"{name}/", str(here / name)):
        digest, said = verified(capsys, path)
        assert digest != stored and said == ""


@pytest.mark.parametrize("name", [NAME, f"{NAME}/{TAG}"])
def test_serve_takes_the_stored_artifact_not_the_folder_of_its_name(
    capsys: pytest.CaptureFixture[str], here: Path, stored: str, name: str
) -> None:
    command = ["serve", "--print", "--model", str(MODEL), "--device", "cpu", "--json"]
    assert run([*command, name]) == 0
    shown = capsys.readouterr()
    assert parsed(shown.out)["digest"] == stored and shown.err == ""
    assert run([*command, f"./{name}"]) == 0
    assert parsed(capsys.readouterr().out)["digest"] != stored
    assert run([*command[:-1], name]) == 0
    assert f"the folder of that name is ./{name}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "serve", "eval"])
def test_a_name_that_nobody_knows_asks_whether_the_folder_was_meant(
    capsys: pytest.CaptureFixture[str], here: Path, command: str, tmp_path: Path
) -> None:
    hub = [] if command == "verify" else ["--hub", f"file:{tmp_path}/hub"]
    (tmp_path / "hub").mkdir()
    for name in ("mine", f"{NAME}/{TAG}"):
        if name == "mine":
            write_folder(here / name, artifact_files())
        line = failure(capsys, 3, command, name, *hub)
        assert f"Did you mean the folder ./{name}?" in line
    write_folder(here / "a/b/c", artifact_files())
    assert "Did you mean the folder ./a/b/c?" in failure(capsys, 3, command, "a/b/c", *hub)
    (here / "rotation").write_bytes(b"")
    assert "Did you mean the file ./rotation?" in failure(capsys, 3, command, "rotation", *hub)


@pytest.mark.parametrize("command", ["serve", "pull"])
def test_nothing_is_computed_for_a_path_without_its_dot(
    capsys: pytest.CaptureFixture[str], here: Path, command: str, tmp_path: Path
) -> None:
    (tmp_path / "hub").mkdir()
    hub = ("--hub", f"file:{tmp_path}/hub")
    line = failure(capsys, 3, command, "try/rotation", *hub)
    assert "A folder would be written ./try/rotation; to compute one: " in line
    (here / "try").mkdir()
    line = failure(capsys, 3, command, "try/rotation", *hub)
    assert "nothing is at ./try/rotation" in line and "--compute" not in line
    (here / "try" / "rotation").mkdir()
    line = failure(capsys, 3, command, "try/rotation", *hub)
    assert "--compute" not in line
    assert ("Did you mean the folder ./try/rotation?" in line) == (command == "serve")


def test_python_takes_names_and_paths_by_the_same_rule(here: Path) -> None:
    with pytest.raises(ArtifactNotFound) as caught:
        oscar_zoo.verify(NAME)
    assert caught.value.hint == f"did you mean the folder ./{NAME}?"
    for path in (f"./{NAME}", Path(NAME), here / NAME, str(here / NAME)):
        assert isinstance(oscar_zoo.verify(path), Verified)


def test_pull_computes_for_a_folder_that_is_written_as_one(
    capsys: pytest.CaptureFixture[str], here: Path, tmp_path: Path
) -> None:
    shutil.copytree(MODEL, here / "my-model")
    (tmp_path / "hub").mkdir()
    hub = ("--hub", f"file:{tmp_path}/hub")
    for more in ((), ("--compute", "--dry-run")):
        line = failure(capsys, 3, "pull", "my-model", *hub, *more)
        assert "Did you mean the folder ./my-model?" in line and "--compute" not in line
    assert run(["pull", "./my-model", *hub, "--compute", "--dry-run", "--json"]) == 0
    (row,) = parsed(capsys.readouterr().out)["artifacts"]
    assert row["model"] == "./my-model"


def test_a_model_is_a_folder_a_name_of_the_zoo_or_an_id(here: Path) -> None:
    shutil.copytree(MODEL, here / "tiny")
    assert choose_model("tiny").source == choose_model("./tiny").source == "./tiny"
    assert choose_model(Path("tiny")).source == "./tiny"
    assert (
        choose_model("Qwen3-8B").source == choose_model("qwen/qwen3-8b").source == "Qwen/Qwen3-8B"
    )
    assert choose_model("someone/else").source == "someone/else"
    (here / "Qwen3-8B").mkdir()
    assert choose_model("Qwen3-8B").source == "Qwen/Qwen3-8B"
    assert choose_model("Qwen3-8B").notes == choose_model("./tiny").notes == ()


def test_a_name_of_the_zoo_wins_over_a_model_in_a_folder(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    shutil.copytree(MODEL, here / "Qwen3-8B")
    with TerminalObserver() as observer:
        assert parse_model("Qwen3-8B", observer).source == "Qwen/Qwen3-8B"
    assert (
        capsys.readouterr().err
        == "note: Qwen3-8B is taken as a name; the folder of that name is ./Qwen3-8B\n"
    )
    assert choose_model("./Qwen3-8B").source == "./Qwen3-8B"
    assert choose_model("./Qwen3-8B").notes == ()


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "someone/else"])
def test_an_id_means_the_folder_that_loaders_would_take(
    capsys: pytest.CaptureFixture[str], here: Path, model: str
) -> None:
    (here / model).mkdir(parents=True)
    assert choose_model(model).source == model
    shutil.copytree(MODEL, here / model, dirs_exist_ok=True)
    with TerminalObserver() as observer:
        assert parse_model(model, observer).source == f"./{model}"
    assert (
        capsys.readouterr().err
        == f"note: {model} is the folder ./{model} here, not the model of that id on a hub\n"
    )


def test_what_is_no_model_says_so(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "file").write_text("")
    with pytest.raises(PathNotFound, match="no model is called 'empty'") as caught:
        choose_model("empty")
    assert caught.value.hint == "did you mean the folder ./empty, which has no config.json?"
    with pytest.raises(UsageError, match="file is a file"):
        choose_model("file")
    with pytest.raises(PathNotFound, match=r"no such model folder: \./gone"):
        choose_model("./gone")
    with pytest.raises(PathNotFound) as caught:
        choose_model("qwen3-7b")
    assert "Qwen3-8B" in caught.value.suggestions


def test_an_alias_works_everywhere(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias that `publish` gave is known to every command, offline too once the hub is a folder
    here."""
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    assert run(["publish", f"./{NAME}/{TAG}", "--alias", "small"]) == 0
    assert run(["pull", "small"]) == 0
    capsys.readouterr()
    assert verified(capsys, "SMALL") == verified(capsys, f"{NAME}:{TAG}")
    assert isinstance(oscar_zoo.verify("small"), Verified)
    assert len(oscar_zoo.installed("small")) == 1
    assert run(["info", "small", "--json"]) == 0
    facts = parsed(capsys.readouterr().out)
    assert facts["name"] == NAME and [row["id"] for row in facts["installed"]] == [f"{NAME}/{TAG}"]
    assert run(["list", "--for", "small", "--json"]) == 0
    assert [row["tag"] for row in parsed(capsys.readouterr().out)["artifacts"]] == [TAG]
    assert (
        run(["serve", "small", "--print", "--model", str(MODEL), "--device", "cpu", "--json"]) == 0
    )
    assert f"--oscar-artifact={NAME}:{TAG}" in parsed(capsys.readouterr().out)["argv"]
    assert choose_model("small").name == NAME
    assert choose_model("qwen3-4b-thinking").name == "Qwen3-4B-Thinking-2507"
    assert run(["cache", "rm", "small"]) == 0
    capsys.readouterr()
    assert "small is not in the store" in failure(capsys, 3, "verify", "small")
    assert run(["info", "qwen3-4b-thinking", "--offline", "--json"]) == 0
    assert parsed(capsys.readouterr().out)["name"] == "Qwen3-4B-Thinking-2507"


@pytest.mark.parametrize("command", ["pull", "serve", "eval", "info"])
def test_a_hub_that_is_missing_is_the_cause_beside_a_folder_of_the_name(
    capsys: pytest.CaptureFixture[str],
    here: Path,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(MODEL, here / "my-model")
    monkeypatch.setenv("OSCAR_ZOO_HUB", f"file:{tmp_path}/missing")
    more = ["--compute"] if command == "pull" else []
    line = failure(capsys, 3, command, "my-model", *more)
    assert f"no such folder for a hub: {tmp_path}/missing" in line and "./my-model" not in line
    make = f"oscar-zoo publish FOLDER --hub file:{tmp_path}/missing --create"
    assert "OSCAR_ZOO_HUB" in line and make in line


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only hub does not answer, because its client was imported in offline mode. The current
    folder is empty."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_PORT"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:org/zoo")


@pytest.mark.parametrize("name", ["ckpt", NAME])
@pytest.mark.parametrize("command", ["pull", "eval", pytest.param("serve", marks=needs_sglang)])
@pytest.mark.usefixtures("silent")
def test_a_model_folder_is_called_one_where_hubs_are_silent(
    capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    """It is here, whatever its name; the way on is to compute its rotation."""
    shutil.copytree(MODEL, name)
    what = f"error: ./{name} is a model; no rotation for it is on this machine, and"
    makes = f"Compute one: oscar-zoo {'serve' if command == 'serve' else 'pull'} ./{name} --compute"
    said = failure(capsys, 5, command, f"./{name}")
    assert said.startswith(f"{what} not every hub could be asked (Hugging Face org/zoo ")
    assert said.endswith(f"). {makes}\n")
    said = failure(capsys, 5, command, f"./{name}", "--offline")
    assert said == f"{what} offline mode asks no hub. {makes} --offline\n"


@pytest.mark.parametrize("more", [[], ["--compute"], ["--dry-run"], ["--compute", "--dry-run"]])
@pytest.mark.usefixtures("silent")
def test_the_bare_name_of_a_folder_is_named_where_hubs_are_silent(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    shutil.copytree(MODEL, "ckpt")
    said = failure(capsys, 5, "pull", "ckpt", *more)
    cause = "error: ckpt is unknown on this machine, and not every hub can be asked: Hugging Face "
    assert said.startswith(cause) and said.endswith(". Did you mean the folder ./ckpt?\n")
    said = failure(capsys, 5, "pull", "ckpt", *more, "--offline")
    cause = "error: ckpt is not on this machine, and offline mode asks no hub."
    assert said == f"{cause} Did you mean the folder ./ckpt?\n"
