"""`verify`: the command and the Python call say the same of files, folders and what is stored."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from documents import ROOT
from tiny_artifacts import K_NAME, TINY, artifact_files, manifest, payload, write_folder

import oscar_zoo
from oscar_zoo.artifact import files
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import DigestMismatch, Rejected, Verified
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.cli.main import run
from oscar_zoo.cli.render.headlines import _OTHERWISE, rejection
from oscar_zoo.errors import ArtifactNotFound, PathNotFound, UsageError
from oscar_zoo.registry.store import Store

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
NAME, TAG = "tiny-qwen3-hard", "seq512_prompt2_group64"
WRONG = "sha256:" + "0" * 64
SPARSE = TINY.model_copy(update={"num_layers": 8, "attention_layers": (1, 3, 5, 7)})


@pytest.fixture
def stored() -> str:
    """The digest of an artifact in the store."""
    return Store().put(ArtifactId(NAME, TAG), artifact_files(), source="test").record.digest


def result(cli: Cli, code: int, *arguments: object) -> dict[str, Any]:
    """The one result of `verify ... --json`, which must end with `code`."""
    (found,) = cli.json(code, "verify", *arguments)["results"]
    return dict(found)


def damage(path: Path, part: int = 2) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // part] ^= 1
    path.write_bytes(data)


def test_a_wrong_digest_fails_in_store_and_folder(cli: Cli, artifact: Path, stored: str) -> None:
    for target in (NAME, artifact):
        found = result(cli, 4, target, "--digest", WRONG)
        assert (found["outcome"], found["want"], found["got"]) == ("digest_mismatch", WRONG, stored)
        assert result(cli, 0, target, "--digest", stored)["outcome"] == "verified"
        outcome = oscar_zoo.verify(target, digest=WRONG)
        assert isinstance(outcome, DigestMismatch) and outcome.want == WRONG
        assert outcome.got == stored
        assert isinstance(
            oscar_zoo.verify(target, digest=stored.removeprefix("sha256:").upper()), Verified
        )


def test_another_model_fails_for_a_stored_artifact_as_for_a_folder(
    cli: Cli, artifact: Path, stored: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    for target in (NAME, artifact):
        for model in ("Qwen3-8B", str(other)):
            assert result(cli, 4, target, "--model", model)["code"] in (
                "layers.missing",
                "model.geometry",
            )
            assert isinstance(oscar_zoo.verify(target, model=model), Rejected)
        for model in (NAME, str(MODEL)):
            assert result(cli, 0, target, "--model", model)["outcome"] == "verified"
            assert isinstance(oscar_zoo.verify(target, model=model), Verified)


def test_a_damaged_stored_file_is_an_outcome(cli: Cli, stored: str) -> None:
    damage(next(Path(os.environ["OSCAR_ZOO_CACHE"]).rglob(f"artifacts/*/*/{K_NAME}")))
    found = result(cli, 4, NAME)
    outcome = oscar_zoo.verify(NAME)
    assert isinstance(outcome, DigestMismatch) and found["outcome"] == "digest_mismatch"
    assert outcome.want == found["want"] and outcome.got == found["got"]
    assert outcome.want != outcome.got


def test_what_python_cannot_verify_is_an_error(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFound):
        oscar_zoo.verify("nobody-has-this")
    with pytest.raises(PathNotFound):
        oscar_zoo.verify(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no model is called"):
        oscar_zoo.verify(artifact, model="Qwen3-7B")
    with pytest.raises(UsageError, match="not a digest"):
        oscar_zoo.verify(artifact, digest="zz")
    shutil.copytree(artifact, tmp_path / "tree/one")
    assert isinstance(oscar_zoo.verify(tmp_path / "tree"), Verified)


def test_a_misfit_names_the_model_that_was_asked_for(cli: Cli, artifact: Path, stored: str) -> None:
    for target in (artifact, NAME):
        cli(4, "verify", target, "--model", "Qwen3-8B")
        assert "Next: it does not fit Qwen3-8B; name the model that it was made for" in cli.err


def test_quiet_prints_failures_only(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    assert cli(0, "verify", artifact, "--quiet") == "" == cli.err
    bad = write_folder(tmp_path / "bad", artifact_files())
    damage(bad / K_NAME)
    out = cli(4, "verify", artifact, bad, "-q")
    assert f"{bad}  FAILED" in out.replace("\n", "") and "passed" not in out
    assert f"{artifact}  OK" not in out and "Next, " in cli.err


def test_every_code_has_words() -> None:
    """Codes are in the sources; each has words of its own, or those of its kind."""
    found = set()
    for path in (ROOT / "oscar_zoo/artifact").glob("*.py"):
        text = path.read_text("utf-8")
        found |= set(re.findall(r'(?:reject|MalformedFile)\(\s*"([a-z_.-]+)"', text))
    assert "not_orthogonal" in found and "file.changed" in found
    for code in found:
        assert _OTHERWISE not in rejection(Rejected("bytes", code, "m")), code


def test_layers_with_gaps_pass_where_the_model_is_not_known(cli: Cli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "some", payload(geometry=SPARSE))
    text = cli(0, "verify", folder)
    assert "layers 1, 3, 5, 7" in text and "cover of layers not checked" in text
    assert "layers.not_checked" in text
    assert result(cli, 4, folder, "--strict")["code"] == "layers.gaps"
    gap: Geometry = SPARSE.model_copy(update={"attention_layers": (0, 1, 3, 5, 7)})
    config = json.loads((MODEL / "config.json").read_text())
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": gap.num_layers}))
    assert result(cli, 4, folder, "--model", model)["code"] == "layers.missing"


@pytest.mark.parametrize("name", ["README.md", "docs/figures/serving.svg", "pyproject.toml"])
def test_a_file_of_another_kind_is_no_damaged_copy(cli: Cli, name: str) -> None:
    cli(4, "verify", ROOT / name)
    assert cli.err.startswith("Next: this is no rotation; give a rotation file or a folder")


def test_a_file_of_torch_that_is_no_rotation_is_no_damaged_copy(cli: Cli, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path, ones = tmp_path / "foo.pt", torch.ones(2, 2)
    for content, said, step in (
        ({"weight": ones}, "a file is no rotation (schema.foreign)", "Next: this is no rotation"),
        (ones, "a file is no rotation (schema.foreign)", "Next: this is no rotation"),
        ([1, 2], "a file holds more than arrays", "somebody changed it: never load it"),
        (torch.nn.Linear(2, 2), "a file holds more than arrays", "never load it"),
        ({"weight": ones, "layers": {}}, "", "do not use this copy"),
    ):
        torch.save(content, path)
        assert said in cli(4, "verify", path)
        assert step in cli.err


def test_a_stray_file_beside_artifacts_is_named(
    cli: Cli, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    tree = tmp_path / "tree"
    shutil.copytree(artifact, tree / "a")
    torch.save({"weight": torch.ones(2, 2)}, tree / "foo.pt")
    monkeypatch.chdir(tree)
    for place in (".", tree):
        assert "1 of 2 artifacts passed" in cli(4, "verify", place)
        (line,) = cli.err.splitlines()
        assert line.startswith(f"Next, {place}: foo.pt is alone") and "do not use" not in line


def test_a_rotation_file_of_other_bytes_is_a_damaged_copy(cli: Cli, artifact: Path) -> None:
    (artifact / K_NAME).write_bytes(b"# not a rotation")
    for target in (artifact / K_NAME, artifact):
        cli(4, "verify", target)
        assert "do not use this copy" in cli.err
    assert "a file is no rotation (file.unknown)" in cli(4, "verify", artifact / K_NAME)


def test_one_flipped_byte_and_a_known_digest(artifact: Path, cli: Cli) -> None:
    digest = result(cli, 0, artifact / K_NAME)["files"][0]["sha256"]
    damage(artifact / K_NAME)
    found = result(cli, 4, artifact / K_NAME, "--digest", f"sha256:{digest}")
    assert found["outcome"] == "digest_mismatch" and digest in str(found["want"])
    assert found["got"] != found["want"]


def test_manifests_mean_folders_and_links_targets(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(artifact)
    for path in (artifact / "oscar.json", tmp_path / "link"):
        assert cli(0, "verify", path).startswith(f"{artifact}  OK")


def test_linked_files_come_with_the_right_command(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    """As in the cache of a hub's client; one link among files, and a folder of links alone."""
    pytest.importorskip("torch", reason="eval says first that it needs torch")
    for number, names in enumerate(([K_NAME], [file.name for file in artifact.iterdir()])):
        linked = tmp_path / f"linked {number}"
        shutil.copytree(artifact, linked)
        for name in names:
            (linked / name).unlink()
            (linked / name).symlink_to(artifact / name)
        step = f"cp -rL '{linked}' '{linked}-copy'"
        for command in ("publish", "eval", "serve"):
            line = cli.refused(4, command, linked)
            assert "symbolic link" in line and line.endswith(f"{step}\n")
        cli(4, "verify", linked)
        assert step in cli.err
        subprocess.run(shlex.split(step), check=True)
        cli(0, "verify", f"{linked}-copy")


def swapped_at(
    number: int, artifact: Path, other: Path, patch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """Let another process put the files of `other` into `artifact` just before something in it is
    opened the `number`-th time; returns whether that came about."""
    opens, open_file = [0], files._open

    def swap_first(path: Path) -> tuple[int, int]:
        if path.parent == artifact:
            opens[0] += 1
            if opens[0] == number:
                subprocess.run(
                    ["cp", "-rf", "--remove-destination", f"{other}/.", artifact], check=True
                )
        return open_file(path)

    patch.setattr(files, "_open", swap_first)
    return lambda: opens[0] >= number


@pytest.mark.parametrize(
    ("words", "with_manifest"),
    [
        ("verify FOLDER", True),
        ("verify FOLDER", False),
        (f"serve FOLDER --model {MODEL} --device cpu --print", True),
        (f"serve FOLDER --model {MODEL} --device cpu --print", False),
        ("publish FOLDER --hub file:copy --create --unmeasured", True),
        (f"pull {NAME} --hub file:hub --no-lock --output out", True),
        ("mirror file:hub file:copy --all --create", True),
    ],
)
def test_files_swapped_at_any_moment_are_those_verified_or_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, with_manifest: bool
) -> None:
    sets = [artifact_files(seed=seed, with_manifest=with_manifest) for seed in (0, 1)]
    other = write_folder(tmp_path / "other", sets[1])
    digests = [manifest(payload(seed=seed)).digest.removeprefix("sha256:") for seed in (0, 1)]
    ended = set()
    for number in range(1, 60):
        folder = tmp_path / f"{number}/hub/{NAME}/{TAG}"
        write_folder(folder, sets[0])
        monkeypatch.chdir(tmp_path / str(number))
        monkeypatch.setenv("OSCAR_ZOO_CACHE", str(tmp_path / f"{number}/cache"))
        monkeypatch.setenv("OSCAR_ZOO_STATE", str(tmp_path / f"{number}/state"))
        with monkeypatch.context() as patch:
            swapped = swapped_at(number, folder, other, patch)
            code = run([word.replace("FOLDER", str(folder)) for word in words.split()] + ["--json"])
        told = cli.capsys.readouterr().out
        ended.add(code)
        assert code in (0, 4), told
        named = [digest for digest in digests if digest in told]
        if code == 0 and with_manifest:  # without one, a K and a V of two fits are a third pair
            (one,) = named
            for place in ("copy", "out", "cache"):
                for file in (tmp_path / str(number) / place).rglob("*.pt"):
                    assert file.read_bytes() == sets[digests.index(one)][file.name]
        assert code == 4 or len(named) <= 1
        if not swapped():
            break
    assert ended >= ({0, 4} if with_manifest else {0}) and 3 < number < 59
