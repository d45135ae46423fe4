"""`pull` and every command that takes a name: names and folders, locks, and the command that an
error proposes, which keeps what was typed and works as printed."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from cli_output import TINY, Cli
from engines import needs_sglang
from hub_uses import HARD, hub_with
from measured_artifacts import measured_files
from raw_server import closed_port
from tiny_artifacts import K_NAME, artifact_files, write_folder

import oscar_zoo
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.cli.pasting import measuring
from oscar_zoo.errors import ArtifactNotFound, PathNotFound, UsageError
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.targets import choose_model

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TAG = "seq512_prompt2_group64"
SERVE = ("serve", "--print", "--model", MODEL, "--device", "cpu")


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """A folder that no configuration names, with one artifact."""
    return f"file:{hub_with(tmp_path / 'hub', artifact_files()).root}"


@pytest.fixture
def empty(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return f"file:{tmp_path / 'empty'}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an artifact where `compute` writes it, which is not the one in the
    store."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / TINY / TAG, measured_files(seed=1))
    return tmp_path


@pytest.fixture
def stored() -> str:
    """The digest of the artifact of that name in the store."""
    return Store().put(ArtifactId(TINY, TAG), artifact_files(), source="test").record.digest


def verified(cli: Cli, *arguments: object) -> tuple[str, str]:
    """Digest of the one artifact that `verify` checks, and what it says on stderr."""
    out = cli(0, "verify", *arguments)
    return out.rpartition("digest         ")[2].split()[0], cli.err


@pytest.mark.parametrize("name", [TINY, f"{TINY}/{TAG}"])
def test_a_name_wins_over_a_folder_and_says(cli: Cli, here: Path, stored: str, name: str) -> None:
    note = f"note: {name} is taken as a name; the folder of that name is ./{name}\n"
    assert verified(cli, name) == (stored, note)
    assert isinstance(oscar_zoo.verify(name), Verified)
    for path in (f"./{name}", f"{name}/", here / name):
        digest, said = verified(cli, path)
        assert digest != stored and said == ""
    assert cli.json(0, *SERVE, name)["digest"] == stored
    assert cli.json(0, *SERVE, f"./{name}")["digest"] != stored
    cli(0, *SERVE, name)
    assert note in cli.err


@pytest.mark.parametrize("command", ["verify", "serve", "eval"])
def test_an_unknown_name_may_mean_a_folder(cli: Cli, here: Path, command: str, empty: str) -> None:
    hub = [] if command == "verify" else ["--hub", empty]
    write_folder(here / "mine", artifact_files())
    write_folder(here / "a/b/c", artifact_files())
    (here / "rotation").write_bytes(b"")
    for name in ("mine", f"{TINY}/{TAG}", "a/b/c"):
        assert f"Did you mean the folder ./{name}?" in cli.refused(3, command, name, *hub)
    assert "Did you mean the file ./rotation?" in cli.refused(3, command, "rotation", *hub)


@pytest.mark.parametrize("command", ["serve", "pull"])
def test_no_path_without_a_dot_is_computed(cli: Cli, here: Path, command: str, empty: str) -> None:
    words = (command, "try/rotation", "--hub", empty)
    line = cli.refused(3, *words)
    assert "A folder would be written ./try/rotation; to compute one: " in line
    (here / "try").mkdir()
    line = cli.refused(3, *words)
    assert "nothing is at ./try/rotation" in line and "--compute" not in line
    (here / "try" / "rotation").mkdir()
    line = cli.refused(3, *words)
    assert "--compute" not in line
    assert ("Did you mean the folder ./try/rotation?" in line) == (command == "serve")


def test_python_takes_names_and_paths_by_the_same_rule(here: Path) -> None:
    with pytest.raises(ArtifactNotFound) as caught:
        oscar_zoo.verify(TINY)
    assert caught.value.hint == f"did you mean the folder ./{TINY}?"
    for path in (f"./{TINY}", Path(TINY), here / TINY, str(here / TINY)):
        assert isinstance(oscar_zoo.verify(path), Verified)


def test_pull_computes_for_a_folder_written_as_one(cli: Cli, here: Path, empty: str) -> None:
    shutil.copytree(MODEL, here / "my-model")
    for more in ((), ("--compute", "--dry-run")):
        line = cli.refused(3, "pull", "my-model", "--hub", empty, *more)
        assert "Did you mean the folder ./my-model?" in line and "--compute" not in line
    (row,) = cli.json(0, "pull", "./my-model", "--hub", empty, "--compute", "--dry-run")[
        "artifacts"
    ]
    assert row["model"] == "./my-model"


def test_a_model_is_a_folder_a_name_of_the_zoo_or_an_id(here: Path) -> None:
    """An id means the folder that loaders would take; a name of the zoo wins over one."""

    def check(given: str | Path, source: str, note: str = "") -> None:
        chosen = choose_model(given)
        assert chosen.source == source
        assert note in "".join(chosen.notes)
        assert bool(chosen.notes) == bool(note)

    for name in ("tiny", "Qwen3-8B"):
        shutil.copytree(MODEL, here / name)
    check("tiny", "./tiny")
    check(Path("tiny"), "./tiny")
    check("./Qwen3-8B", "./Qwen3-8B")
    check("Qwen3-8B", "Qwen/Qwen3-8B", "is taken as a name; the folder of that name is ./Qwen3-8B")
    check("qwen/qwen3-8b", "Qwen/Qwen3-8B")
    for name in ("Qwen/Qwen3-8B", "someone/else"):
        (here / name).mkdir(parents=True)
        check(name, name)
        shutil.copytree(MODEL, here / name, dirs_exist_ok=True)
        check(name, f"./{name}", f"is the folder ./{name} here, not the model of that id on a hub")


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


def test_an_alias_works_everywhere(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias that `publish` gave is known to every command, offline too once the hub is a folder
    here."""
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    cli(0, "publish", f"./{TINY}/{TAG}", "--alias", "small")
    cli(0, "pull", "small")
    assert verified(cli, "SMALL") == verified(cli, f"{TINY}:{TAG}")
    assert isinstance(oscar_zoo.verify("small"), Verified)
    assert len(oscar_zoo.installed("small")) == 1
    facts = cli.json(0, "info", "small")
    assert facts["name"] == TINY and [row["id"] for row in facts["installed"]] == [f"{TINY}/{TAG}"]
    assert [row["tag"] for row in cli.json(0, "list", "--for", "small")["artifacts"]] == [TAG]
    assert f"--oscar-artifact={TINY}:{TAG}" in cli.json(0, *SERVE, "small")["argv"]
    assert choose_model("small").name == TINY
    assert choose_model("qwen3-4b-thinking").name == "Qwen3-4B-Thinking-2507"
    cli(0, "cache", "rm", "small")
    assert "small is not in the store" in cli.refused(3, "verify", "small")
    known = cli.json(0, "info", "qwen3-4b-thinking", "--offline")
    assert known["name"] == "Qwen3-4B-Thinking-2507"


@pytest.mark.parametrize("command", ["pull", "serve", "eval", "info"])
def test_a_hub_that_is_missing_is_the_cause_beside_a_folder_of_the_name(
    cli: Cli, here: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(MODEL, here / "my-model")
    monkeypatch.setenv("OSCAR_ZOO_HUB", f"file:{here}/missing")
    more = ["--compute"] if command == "pull" else []
    line = cli.refused(3, command, "my-model", *more)
    assert f"no such folder for a hub: {here}/missing" in line and "./my-model" not in line
    make = f"oscar-zoo publish FOLDER --hub file:{here}/missing --create"
    assert "OSCAR_ZOO_HUB" in line and make in line


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only hub does not answer, because its client was imported in offline mode. The current
    folder is empty."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_PORT"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:org/zoo")


@pytest.mark.parametrize("name", ["ckpt", TINY])
@pytest.mark.parametrize("command", ["pull", "eval", pytest.param("serve", marks=needs_sglang)])
@pytest.mark.usefixtures("silent")
def test_a_model_folder_is_called_one_by_silent_hubs(cli: Cli, command: str, name: str) -> None:
    """It is here, whatever its name; the way on is to compute its rotation."""
    shutil.copytree(MODEL, name)
    what = f"error: ./{name} is a model; no rotation for it is on this machine, and"
    makes = f"Compute one: oscar-zoo {'serve' if command == 'serve' else 'pull'} ./{name} --compute"
    said = cli.refused(5, command, f"./{name}")
    assert said.startswith(f"{what} not every hub could be asked (Hugging Face org/zoo ")
    assert said.endswith(f"). {makes}\n")
    said = cli.refused(5, command, f"./{name}", "--offline")
    assert said == f"{what} offline mode asks no hub. {makes} --offline\n"


@pytest.mark.parametrize("more", [[], ["--compute"], ["--compute", "--dry-run"]])
@pytest.mark.usefixtures("silent")
def test_the_bare_name_of_a_folder_is_told_where_hubs_are_silent(cli: Cli, more: list[str]) -> None:
    shutil.copytree(MODEL, "ckpt")
    for offline in ([], ["--offline"]):
        said = cli.refused(5, "pull", "ckpt", *more, *offline)
        assert said.endswith(" Did you mean the folder ./ckpt?\n")
    said = cli.refused(5, "serve", "ckpt", "--print")
    assert "Did you mean the folder ./ckpt?" in said and "oscar-zoo pull" not in said


def proposed(line: str) -> list[str]:
    """The arguments of the last command in the line of an error."""
    return shlex.split(line.rpartition("oscar-zoo ")[2])


def test_what_a_hub_does_not_have_is_computed_by_the_same_command(cli: Cli, empty: str) -> None:
    typed = ["pull", str(MODEL), "--hub", empty, "--device", "cpu", "--dry-run", "--no-lock"]
    again = proposed(cli.refused(3, *typed))
    assert {*typed, "--compute"} == {*again}
    assert "Would compute one" in cli(0, *again)
    typed = [*map(str, SERVE), TINY, "--hub", empty, "--port", "4000"]
    assert {*typed, "--compute"} == {*proposed(cli.refused(3, *typed))}


@pytest.mark.parametrize(
    "words",
    [
        "serve --print",
        "eval --task recall --answers 3",
        "eval --engine sglang --chunk 64,128 --csv 'a b.csv' -- --mem-fraction-static=0.5",
        "eval --task sample --limit 3 -- --mem-fraction-static=0.5",
        "bench serve --batch 1 -- --mem-fraction-static=0.5",
        "bench load --clients 2",
    ],
)
def test_a_model_on_no_hub_needs_its_folder(
    cli: Cli, hub: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSCAR_ZOO_PORT")
    typed, *flags = words.split(" -- ")
    given = [*shlex.split(typed), TINY, "--hub", hub]
    flags = ["--", *flags] if flags else []
    line = cli.refused(2, *given, *flags)
    assert sorted(proposed(line)) == sorted([*given, "--model", "FOLDER", *flags]), line


@pytest.mark.parametrize("name", [TINY, f"oscar-zoo/{TINY}"])
def test_a_model_on_no_hub_that_was_named(cli: Cli, artifact: Path, name: str) -> None:
    """`--model` takes its folder; nothing is started, loaded or looked up before that is said."""
    cause = f"the checkpoint of {TINY} is on no hub. Give its folder: oscar-zoo "
    folder = str(artifact)
    for command in (
        ["serve", folder, "--device", "cpu"],
        ["serve", folder, "--print"],
        ["serve", TINY, "--compute", "--device", "cpu"],
        ["eval", folder, "--task", "recall"],
        ["eval", folder, "--against", "fp8"],
        ["eval", folder, "--engine", "sglang"],
        ["eval", folder, "--task", "sample"],
        ["ruler", folder],
        ["bench", "serve", folder, "--batch", "1"],
        ["bench", "load", folder, "--clients", "2"],
    ):
        line = cli.refused(2, *command, "--model", name)
        assert cause in line and {*command, "--model", "FOLDER"} <= {*proposed(line)}, line
        assert name not in proposed(line) or name in command
    line = cli.refused(2, "eval", folder, f"--model={name}", "--engine", "sglang")
    assert proposed(line) == ["eval", folder, "--model", "FOLDER", "--engine", "sglang"]
    cli(0, "verify", folder, "--model", name)  # its shapes are in the zoo


def test_every_printed_command_says_where_the_folder_of_a_model_on_no_hub_goes(
    cli: Cli, hub: str, tmp_path: Path
) -> None:
    cause = f"the checkpoint of {TINY} is on no hub. Give its folder: oscar-zoo"
    compute = cli.refused(2, "compute", TINY, "--output-dir", tmp_path / "out")
    assert f"{cause} compute FOLDER" in compute
    assert f"{cause} pull FOLDER --compute" in cli.refused(2, "pull", TINY, "--compute")
    told = cli(0, "info", TINY)
    assert "weights 6.9 MB (its shapes, in BF16)" in told and "oscar-zoo compute FOLDER" in told
    assert "oscar-zoo pull Qwen3.5-4B --compute" in cli(0, "info", "Qwen3.5-4B")
    cli(0, "pull", TINY, "--hub", hub)
    assert f"oscar-zoo serve {TINY}:{TAG} --model FOLDER" in cli.err and "Next" not in cli.err
    step = "oscar-zoo eval ./made --model FOLDER"
    assert measuring(Path("made"), f"oscar-zoo/{TINY}").endswith(step)


def test_names_are_listed_where_they_were_looked_for(cli: Cli, hub: str, empty: str) -> None:
    for hubs in ([hub], [hub, empty]):
        options = [word for name in hubs for word in ("--hub", name)]
        line = cli.refused(3, "pull", "nobody-knows-this", *options)
        again = shlex.split(line.partition("oscar-zoo ")[2].partition(";")[0])
        assert again == ["list", *options] and TAG in cli(0, *again)


def test_a_rotten_entry_of_the_store_is_fetched_from_its_hub(cli: Cli, hub: str) -> None:
    """`verify` fails with both digests and the next command, `info` and `list` still work."""
    cli(0, "pull", TINY, "--hub", hub)
    entry = next(Path(os.environ["OSCAR_ZOO_CACHE"]).rglob(f"artifacts/*/*/{K_NAME}"))
    entry.chmod(0o600)
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    (result,) = cli.json(4, "verify", TINY)["results"]
    assert result["outcome"] == "digest_mismatch" and len(result["want"]) == 64
    assert result["got"] != result["want"]
    for arguments in (["info", TINY], ["list", "--installed"]):
        assert TAG in cli(0, *arguments)
    entry.unlink()
    assert "missing" in cli.refused(4, "eval", TINY, "--model", "Qwen3-8B")
    cli(4, "verify", TINY)
    again = proposed(cli.err)
    assert again == ["pull", f"{TINY}:{TAG}", "--hub", hub]
    cli(0, *again)
    cli(0, "verify", TINY)


@pytest.mark.parametrize("variable", ["OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"])
def test_what_asked_for_offline_mode_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # which the option replaces
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    assert "without --offline" in cli.refused(5, "pull", "Qwen3-8B", "--offline")
    for name in ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1" if name == variable else "")
    told = cli.refused(5, "pull", "Qwen3-8B")
    assert f"nset {variable}" in told and "--offline" not in told


def test_a_copy_here_while_hubs_rest(cli: Cli, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is a command that runs."""
    cli(0, "pull", TINY, "--hub", hub, "--no-lock")
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with closed_port() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        line = cli.refused(5, "pull", TINY, "--hub", "hf:org/zoo")
    command = line.rstrip().rpartition("to use it: oscar-zoo ")[2].partition(";")[0]
    assert command == f"pull {TINY} --offline"
    assert "Already here and intact" in cli(0, *command.split())


@pytest.fixture
def pull(hub: str) -> tuple[str, ...]:
    return ("pull", HARD.model, "--hub", hub)


def locks(tmp_path: Path) -> list[str]:
    return [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("oscar-zoo.lock")]


def test_outside_of_a_project_no_lock_is_written_unless_asked_for(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    cli(0, *pull)
    assert locks(tmp_path) == [] and "oscar-zoo.lock" not in cli.err
    line = cli.refused(2, *pull, "--locked", "--output", "./here", "--dry-run")
    again, hub = ("oscar-zoo", *pull[:2], "--output", "here"), pull[2:]
    add, create = shlex.join((*again, *hub)), shlex.join((*again, "--lock", *hub))
    assert line.endswith(f"Add it without --locked: {add}; outside of a project: {create}\n")
    line = cli.refused(2, *pull, "--locked", "--lock")
    assert shlex.join(("oscar-zoo", *pull[:2], "--lock", *hub)) in line
    cli(0, *pull, "--lock")
    assert locks(tmp_path) == ["work/oscar-zoo.lock"]
    note = "note: pinned in ./oscar-zoo.lock; commit it, or pull with --no-lock to do without"
    assert note in cli.err.splitlines()
    cli(0, *pull)  # it is there now: it is used, and no longer mentioned
    assert "oscar-zoo.lock" not in cli.err
    cli(0, *pull, "--locked")
    cli(0, *pull, "--locked", "--lock")


@pytest.mark.parametrize("marker", [".git", ".hg", "pyproject.toml"])
def test_a_project_gets_a_lock_in_its_root_and_is_told_once(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    inner, lock = tmp_path / "project/src", tmp_path / "project/oscar-zoo.lock"
    inner.mkdir(parents=True)
    (tmp_path / "project" / marker).touch()
    monkeypatch.chdir(inner)
    cli(0, *pull, "--no-lock")
    assert locks(tmp_path) == []
    assert cli.json(0, *pull)["new_lock"] == str(lock)
    assert locks(tmp_path) == ["project/oscar-zoo.lock"]
    assert [pin["id"] for pin in json.loads(lock.read_bytes())["artifacts"]] == [str(HARD)]
    assert cli.json(0, *pull)["new_lock"] is None
    lock.unlink()
    cli(0, *pull)
    assert cli.err.count("pinned in ../oscar-zoo.lock") == 1
    cli(0, *pull, "-q")
    assert cli.err == ""


def test_a_home_folder_stays_clean(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".git").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    cli(0, *pull)
    assert locks(tmp_path) == []


def test_a_locked_copy_says_that_the_hub_was_not_asked(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    assert "no hub was asked" not in cli(0, *pull)
    pinned = cli.json(0, *pull)["artifacts"][0]["pinned_by"]
    assert pinned == str(tmp_path / "project/oscar-zoo.lock")
    typo = (*pull[:-1], f"file:{tmp_path}/typo")
    told = "no hub was asked, because ./oscar-zoo.lock pins it\n"
    shown = cli(0, *typo)
    assert "Already here and intact: " in shown and told in shown
    assert told in cli(0, *typo, "--dry-run")
    assert "no hub was asked" not in cli(0, *pull, "--no-lock")
    assert cli.json(0, *pull, "--no-lock")["artifacts"][0]["pinned_by"] is None
    cli(0, "rm", HARD.model)  # locked, and gone
    error = cli.json(5, "pull", HARD.model, "--hub", empty, "--offline")["error"]
    assert error["code"] == "network.offline" and "oscar-zoo.lock" in error["message"]
