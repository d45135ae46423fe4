"""The use cases around the registry, with nothing printed: a text is parsed once, into a path, a
folder with a model, or a name; typed requests go in and typed results come out."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hub_uses import HARD, hub_with
from recorder import Recorder
from tiny_artifacts import artifact_files, write_folder

import oscar_zoo
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.cli.main import run
from oscar_zoo.errors import ArtifactNotFound, OutputExists, PathNotFound, UsageError
from oscar_zoo.observer import SILENT
from oscar_zoo.registry import pull, verify
from oscar_zoo.registry.artifacts import open_artifact
from oscar_zoo.registry.fetch import PullResult
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.params import PullParams, VerifyParams
from oscar_zoo.registry.pull import Offered
from oscar_zoo.registry.targets import (
    ModelTarget,
    NameTarget,
    PathTarget,
    looking_up,
    parse,
    parse_name,
    parse_named,
)
from oscar_zoo.registry.verify import artifacts_at
from oscar_zoo.site.cache import stored
from oscar_zoo.site.info import describe
from oscar_zoo.site.params import CacheListParams


@pytest.fixture(autouse=True)
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> object:
    """The current folder, in which nothing is printed."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(f"file:{hub_with(tmp_path / 'hub', artifact_files()).root}")


def test_pull_gives_one_result_per_target_in_order(sources: Sources, tmp_path: Path) -> None:
    names, out = ("nowhere", HARD.model, "nowhere"), tmp_path / "out"
    (offered,) = pull.run(PullParams(names, hubs=sources.named, dry_run=True)).artifacts
    assert isinstance(offered, Offered) and len(offered.files) == 2
    assert not offered.already_present and stored(CacheListParams()).artifacts == ()
    report = pull.run(PullParams(names, hubs=sources.named, output=out))
    (missing,), (pulled,) = report.errors, report.artifacts  # named twice, pulled once
    assert isinstance(missing, ArtifactNotFound) and isinstance(pulled, PullResult)
    assert pulled.output == out / HARD.model / HARD.tag and report.new_lock is None
    (again,) = pull.run(PullParams(hubs=sources.named, everything=True)).artifacts
    assert isinstance(again, PullResult) and again.already_present


def test_a_pull_that_contradicts_itself_is_refused(sources: Sources) -> None:
    with pytest.raises(UsageError, match="name artifacts"):
        pull.run(PullParams(hubs=sources.named))
    with pytest.raises(UsageError, match="--locked needs the lock"):
        pull.run(PullParams((HARD.model,), hubs=sources.named, lock=False, locked=True))


def test_python_pulls_into_a_folder_and_hears_of_bytes(sources: Sources, tmp_path: Path) -> None:
    heard: dict[str, int] = {}

    def progress(file: str, done: int, total: int) -> None:
        heard[file] = done

    where = {"hubs": list(sources.named), "output": tmp_path / "out"}
    artifact = oscar_zoo.pull(HARD.model, progress=progress, **where)
    assert artifact.id == str(HARD) and artifact.path == tmp_path / "out" / HARD.model / HARD.tag
    assert set(artifact.files) - {"oscar.json"} == set(heard)
    (artifact.path / "oscar.json").write_text("{}")
    with pytest.raises(OutputExists):
        oscar_zoo.pull(HARD.model, **where)


def test_an_artifact_is_one_type_wherever_it_comes_from(sources: Sources, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", artifact_files())
    from_folder = open_artifact(parse(folder), Sources(), SILENT)
    from_hub = open_artifact(parse(HARD.reference), sources, SILENT)
    assert (from_folder.label, from_folder.digest) == (from_hub.label, from_hub.digest)
    assert (from_folder.installed, from_hub.installed) == (False, True)
    assert from_folder.hub is None and from_hub.hub == sources.named[0]
    assert isinstance(from_folder.verified, Verified) and from_hub.verified.k is not None
    (listed,) = oscar_zoo.installed(HARD.model)
    assert listed.outcome is None and listed.verified.digest == from_hub.digest
    assert len(listed.rotations()) == 2


def test_one_digest_is_of_one_target(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "one", artifact_files())
    with pytest.raises(UsageError, match="--digest goes with exactly one"):
        verify.run(VerifyParams((folder, folder), digest="0" * 64))


def test_what_is_known_is_typed(sources: Sources) -> None:
    hubs = list(sources.named)
    found = oscar_zoo.list_artifacts(hubs=hubs)
    assert [row["id"] for row in found.rows] == [str(HARD)] and found.unreachable == ()
    assert oscar_zoo.list_artifacts(hubs=hubs, installed=True).rows == ()
    assert oscar_zoo.list_artifacts(hubs=hubs, model="qwen3-9b").close
    about = describe(parse_name(HARD.model), sources, gpu_memory=24 * 10**9)
    assert [offer.id for offer in about.offered] == [HARD] and about.installed == ()
    assert [manifest.artifact_id for manifest in about.artifacts] == [HARD]
    with pytest.raises(ArtifactNotFound) as caught:
        describe(parse_name("tiny-qwen3-hart"), sources)
    assert HARD.model in caught.value.suggestions


TRAINING = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")


def checkpoint_in(folder: Path, config: str = '{"architectures": ["Qwen3ForCausalLM"]}') -> Path:
    """A model's folder as training leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"weights")
    for name in TRAINING:
        (folder / name).write_bytes(b"state")
    return folder


def test_a_text_is_a_path_or_a_name_with_its_namesake(here: Path) -> None:
    for text in ("./somewhere", "/srv/zoo", "K.pt", "folder/"):
        assert parse(text) == PathTarget(text, Path(text))
    assert parse("Qwen3-8B:tag") == NameTarget("Qwen3-8B:tag", Reference("Qwen3-8B", "tag"))
    (here / "mine").mkdir()
    target = parse("mine")
    assert isinstance(target, NameTarget)
    assert target.namesake == Path("mine") and target.model_namesake is None


def test_a_model_stays_a_model_whatever_lies_in_a_folder_of_it(here: Path) -> None:
    """It stands for the artifact of its name. Rotation files beside its `config.json` make an
    artifact of the folder, and none deeper."""
    folder = here / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_folder(folder / "mine/seq2000_prompt4_group64", artifact_files())
    target = parse("./my model")
    assert isinstance(target, ModelTarget)
    assert target.reference == Reference("my-model") and target.path == Path("my model")
    assert parse_named("./my model") == target
    with pytest.raises(UsageError, match="is a path; this takes a name"):
        parse_name("./my model")
    (folder / "k_rotation.pt").write_bytes(b"")
    assert parse("./my model") == PathTarget("./my model", Path("my model"))


@pytest.mark.parametrize("config", ['{"architectures": ["A"]}', '{"model_type": "qwen3"}'])
def test_what_training_leaves_beside_a_model_is_no_rotation(here: Path, config: str) -> None:
    folder = checkpoint_in(here / "run" / "checkpoint-500", config)
    assert isinstance(parse("./run/checkpoint-500"), ModelTarget)
    with pytest.raises(PathNotFound, match=r"no rotation files in .*run"):
        artifacts_at(Path("run"))
    write_folder(folder / "rotation", artifact_files())
    assert artifacts_at(Path("run"))[1] == [Path("run/checkpoint-500/rotation")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "k_rotation.pt").write_bytes(b""),
        lambda folder: (folder / "V-rotation.pt").write_bytes(b""),
        lambda folder: (folder / "oscar.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_bytes(b"\xff{"),
        lambda folder: (folder / "model.safetensors").rename(folder / "statistics.safetensors"),
    ],
)
def test_rotations_by_name_make_an_artifact(here: Path, spoil: Callable[[Path], object]) -> None:
    folder = checkpoint_in(here / "mine")
    (folder / "training_args.bin").unlink()
    spoil(folder)
    assert parse("./mine") == PathTarget("./mine", Path("mine"))
    assert artifacts_at(Path("mine"))[1] == [Path("mine")]


def test_a_command_that_takes_names_refuses_paths(here: Path) -> None:
    """It offers a command for what lies there, and none where nothing could work."""
    write_folder(here / "a b", artifact_files())
    (here / "empty").mkdir()
    for parse_it in (parse_named, parse_name):
        with pytest.raises(UsageError, match="is a path; this takes a name") as caught:
            parse_it("./a b")
        assert caught.value.hint == "it is here already: oscar-zoo verify './a b'"
        with pytest.raises(PathNotFound, match="and no rotations in"):
            parse_it("./empty")
        with pytest.raises(PathNotFound, match="no such file or folder") as missing:
            parse_it("./nope")
        assert "verify" not in (missing.value.hint or "")


def test_a_path_without_its_dot_has_one_code(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """However deep it lies, and whatever command it is given to."""
    pytest.importorskip("torch", reason="eval says first that it needs torch")
    commands = ["verify", "info", "eval", "serve", "compare ./one", "fit-gpu --memory 9GB"]
    write_folder(here / "one", artifact_files())
    for folder in ("rotation", "a/rotation", "a/b/rotation"):
        write_folder(here / folder, artifact_files())
        for words in map(str.split, commands):
            assert run([*words, folder]) == 3, (words, folder)
            said = capfd.readouterr().err
            assert f"Did you mean the folder ./{folder}" in said, (words, said)


def test_a_namesake_is_mentioned_in_a_note_or_in_the_error(here: Path) -> None:
    (here / "mine").mkdir()
    target, heard = parse("mine"), Recorder()
    with looking_up(target, heard):
        pass
    assert heard.codes == ["target.namesake"]
    with pytest.raises(ArtifactNotFound) as caught, looking_up(target, heard):
        raise ArtifactNotFound.for_name("mine")
    assert caught.value.hint == "did you mean the folder ./mine?" and len(heard.notes) == 1
