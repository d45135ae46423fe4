"""`verify`: the command and the Python call say the same of files, folders and what is stored."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_output import parsed
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
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "artifact", artifact_files())


@pytest.fixture
def stored() -> str:
    """The digest of an artifact in the store."""
    return Store().put(ArtifactId(NAME, TAG), artifact_files(), source="test").record.digest


def result(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> dict[str, object]:
    """The one result of `verify ... --json`, which must end with `code`."""
    assert run(["verify", *map(str, arguments), "--json"]) == code
    rows = parsed(capsys.readouterr().out)["results"]
    assert len(rows) == 1
    found: dict[str, object] = rows[0]
    return found


def damage(path: Path, part: int = 2) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // part] ^= 1
    path.write_bytes(data)


def test_a_wrong_digest_fails_for_a_stored_artifact_as_for_a_folder(
    capsys: pytest.CaptureFixture[str], folder: Path, stored: str
) -> None:
    for target in (NAME, folder):
        found = result(capsys, 4, target, "--digest", WRONG)
        assert (found["outcome"], found["want"], found["got"]) == ("digest_mismatch", WRONG, stored)
        assert result(capsys, 0, target, "--digest", stored)["outcome"] == "verified"
        outcome = oscar_zoo.verify(target, digest=WRONG)
        assert isinstance(outcome, DigestMismatch) and (outcome.want, outcome.got) == (
            WRONG,
            stored,
        )
        assert isinstance(
            oscar_zoo.verify(target, digest=stored.removeprefix("sha256:").upper()), Verified
        )


def test_another_model_fails_for_a_stored_artifact_as_for_a_folder(
    capsys: pytest.CaptureFixture[str], folder: Path, stored: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    for target in (NAME, folder):
        for model in ("Qwen3-8B", str(other)):
            assert result(capsys, 4, target, "--model", model)["code"] in (
                "layers.missing",
                "model.geometry",
            )
            assert isinstance(oscar_zoo.verify(target, model=model), Rejected)
        for model in (NAME, str(MODEL)):
            assert result(capsys, 0, target, "--model", model)["outcome"] == "verified"
            assert isinstance(oscar_zoo.verify(target, model=model), Verified)


def test_a_damaged_stored_file_is_an_outcome(
    capsys: pytest.CaptureFixture[str], stored: str
) -> None:
    damage(next(Path(os.environ["OSCAR_ZOO_CACHE"]).rglob(f"artifacts/*/*/{K_NAME}")))
    found = result(capsys, 4, NAME)
    outcome = oscar_zoo.verify(NAME)
    assert isinstance(outcome, DigestMismatch) and found["outcome"] == "digest_mismatch"
    assert (outcome.want, outcome.got) == (
        found["want"],
        found["got"],
    ) and outcome.want != outcome.got


def test_what_python_cannot_verify_is_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFound):
        oscar_zoo.verify("nobody-has-this")
    with pytest.raises(PathNotFound):
        oscar_zoo.verify(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no model is called"):
        oscar_zoo.verify(folder, model="Qwen3-7B")
    with pytest.raises(UsageError, match="not a digest"):
        oscar_zoo.verify(folder, digest="zz")
    shutil.copytree(folder, tmp_path / "tree/one")
    assert isinstance(oscar_zoo.verify(tmp_path / "tree"), Verified)
    shutil.copytree(folder, tmp_path / "tree/two")
    with pytest.raises(UsageError, match="holds 2 artifacts"):
        oscar_zoo.verify(tmp_path / "tree")


def test_a_misfit_names_the_model_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], folder: Path, stored: str
) -> None:
    for target in (str(folder), NAME):
        assert run(["verify", target, "--model", "Qwen3-8B"]) == 4
        assert (
            "Next: it does not fit Qwen3-8B; name the model that it was made for"
            in capsys.readouterr().err
        )


def test_quiet_prints_failures_only(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    assert run(["verify", str(folder), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    bad = write_folder(tmp_path / "bad", artifact_files())
    damage(bad / K_NAME)
    assert run(["verify", str(folder), str(bad), "-q"]) == 4
    out, err = capsys.readouterr()
    assert (
        f"{bad}  FAILED" in out.replace("\n", "")
        and f"{folder}  OK" not in out
        and "passed" not in out
    )
    assert "Next, " in err


def test_every_code_has_words() -> None:
    """Codes are in the sources; each has words of its own, or those of its kind."""
    found = set()
    for path in (ROOT / "oscar_zoo/artifact").glob("*.py"):
        text = path.read_text("utf-8")
        found |= set(re.findall(r'(?:reject|MalformedFile)\(\s*"([a-z_.-]+)"', text))
    assert "not_orthogonal" in found and "file.changed" in found
    for code in found:
        assert _OTHERWISE not in rejection(Rejected("bytes", code, "m")), code


def test_layers_with_gaps_pass_where_the_model_is_not_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "some", payload(geometry=SPARSE))
    assert run(["verify", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "layers 1, 3, 5, 7" in text and "cover of layers not checked" in text
    assert "layers.not_checked" in text
    found = result(capsys, 4, folder, "--strict")
    assert found["code"] == "layers.gaps"
    gap: Geometry = SPARSE.model_copy(update={"attention_layers": (0, 1, 3, 5, 7)})
    config = json.loads((MODEL / "config.json").read_text())
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": gap.num_layers}))
    assert result(capsys, 4, folder, "--model", model)["code"] == "layers.missing"


@pytest.mark.parametrize("name", ["README.md", "docs/figures/serving.svg", "pyproject.toml"])
def test_a_file_of_another_kind_is_no_damaged_copy(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(["verify", str(ROOT / name)]) == 4
    captured = capsys.readouterr()
    assert "Next: this is no rotation; give a rotation file or a folder" in captured.err
    assert "fetch it again" not in captured.err and "do not use" not in captured.err


def test_a_file_of_torch_that_is_no_rotation_is_no_damaged_copy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "foo.pt"
    for content in ({"weight": torch.ones(2, 2)}, torch.ones(2, 2)):
        torch.save(content, path)
        assert run(["verify", str(path)]) == 4
        captured = capsys.readouterr()
        assert "a file is no rotation (schema.foreign)" in captured.out
        assert captured.err == (
            "Next: this is no rotation; give a rotation file or a folder that holds a K/V pair\n"
        )
    for other in ([1, 2], torch.nn.Linear(2, 2)):
        torch.save(other, path)
        assert run(["verify", str(path)]) == 4
        captured = capsys.readouterr()
        assert "a file holds more than arrays" in captured.out
        assert "another kind, or somebody changed it: never load it" in captured.err
    torch.save({"weight": torch.ones(2, 2), "layers": {}}, path)
    assert run(["verify", str(path)]) == 4
    assert "do not use this copy" in capsys.readouterr().err


def test_a_stray_file_beside_artifacts_is_named(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    tree = tmp_path / "tree"
    shutil.copytree(folder, tree / "a")
    torch.save({"weight": torch.ones(2, 2)}, tree / "foo.pt")
    monkeypatch.chdir(tree)
    for place in (".", str(tree)):
        assert run(["verify", place]) == 4
        captured = capsys.readouterr()
        assert "1 of 2 artifacts passed" in captured.out
        (line,) = captured.err.splitlines()
        assert line.startswith(f"Next, {place}: foo.pt is alone") and "do not use" not in line


def test_a_rotation_file_of_other_bytes_is_a_damaged_copy(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    path = folder / K_NAME
    path.chmod(0o600)
    path.write_bytes(b"# not a rotation")
    for target in (path, folder):
        assert run(["verify", str(target)]) == 4
        captured = capsys.readouterr()
        assert "do not use this copy" in captured.err
    assert run(["verify", str(path)]) == 4
    assert "a file is no rotation (file.unknown)" in capsys.readouterr().out


def swapped_at(
    number: int, folder: Path, other: Path, patch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """Let another process put the files of `other` into `folder` just before something in it is
    opened the `number`-th time; returns whether that came about."""
    opens, open_file = [0], files._open

    def swap_first(path: Path) -> tuple[int, int]:
        if path.parent == folder:
            opens[0] += 1
            if opens[0] == number:
                subprocess.run(
                    ["cp", "-rf", "--remove-destination", f"{other}/.", folder], check=True
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
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    with_manifest: bool,
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
        told = capsys.readouterr().out
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
