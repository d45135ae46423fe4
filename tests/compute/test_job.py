"""The whole computation on the example model: what is written, what it says, and what happens when
it cannot be."""

import dataclasses
import functools
import hashlib
import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripted_hub import Injection, killed_at, raise_error
from tiny_models import EXAMPLE, write_model

from oscar_zoo import errors
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute.capture import checkpoint
from oscar_zoo.compute.folder import check_target, write_folder
from oscar_zoo.compute.job import compute_artifact
from oscar_zoo.compute.options import Job
from oscar_zoo.compute.outcome import ComputeResult

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
TOKENS = 300


def options(output_dir: Path | None, **changes: object) -> Job:
    base = Job(
        model=str(EXAMPLE),
        model_name="tiny-qwen3-hard",
        calib_data=TEXT,
        calib_tokens=TOKENS,
        recipe=RECIPE,
        seq_len=120,
        method="oscar",
        output=output_dir,
        created="2026-01-02T03:04:05Z",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ComputeResult:
    return compute_artifact(options(tmp_path_factory.mktemp("computed") / "out"))


def test_the_folder_holds_a_verified_artifact(result: ComputeResult) -> None:
    files = content(result.path)
    assert set(files) == {
        "k_rotation_qqt_r_h_pbr.pt",
        "v_rotation_sst_r_h_pbr.pt",
        "statistics.safetensors",
        "oscar.json",
    }
    outcome = verify_files(files, strict=True)
    assert isinstance(outcome, Verified) and outcome.level == "statistics"
    assert outcome.digest == result.manifest.digest == result.verified.digest
    assert result.manifest == Manifest.from_bytes(files["oscar.json"])
    for path in result.path.glob("*.pt"):  # standard torch reads them
        rotation = torch.load(path, weights_only=True)["layers"][3]["rotation"].double()
        assert torch.allclose(rotation @ rotation.T, torch.eye(64, dtype=torch.float64), atol=2e-7)


def test_the_manifest_says_what_was_done(result: ComputeResult) -> None:
    manifest = result.manifest
    assert manifest.id == str(result.id) == "tiny-qwen3-hard/seq300_prompt3_group64"
    assert manifest.created == "2026-01-02T03:04:05Z" and manifest.recipe == RECIPE
    assert manifest.model.config_sha256 == sha256_hex((EXAMPLE / "config.json").read_bytes())
    said = manifest.to_json()["fit"]
    assert (said["estimator"]["k"]["id"], said["estimator"]["v"]["id"]) == ("qqt/1", "sst/1")
    assert said["composition"]["id"] == "r_h_pbr"
    some = {
        "calibration": {"tokens_requested": TOKENS, "tokens_used": TOKENS, "sequences": 3},
        "coverage": {"layers": 4, "q_heads": 4, "kv_heads": 2, "tokens_min": TOKENS},
        "numerics": {"forward_dtype": "bfloat16", "accumulate": "float64"},
    }
    for block, facts in some.items():
        assert said[block] | facts == said[block]
    assert said["calibration"]["dataset"] == "calibration.txt"
    assert manifest.provenance.kind == "computed"
    assert (manifest.license.artifact, manifest.license.model) == (None, None)


def test_no_file_names_this_machine(result: ComputeResult) -> None:
    secrets = [str(EXAMPLE.parent), str(result.path.parent), socket.gethostname(), str(Path.home())]
    for name, data in content(result.path).items():
        for secret in secrets:
            assert len(secret) < 4 or secret.encode() not in data, f"{name} holds {secret}"


def test_the_same_options_give_the_same_bytes(result: ComputeResult, tmp_path: Path) -> None:
    """Time and the name of the file are no part of the digest."""
    again = compute_artifact(options(tmp_path / "again"))
    assert content(again.path) == content(result.path)
    renamed = tmp_path / "renamed.txt"
    renamed.write_bytes(TEXT.read_bytes())
    other = compute_artifact(options(tmp_path / "out", created=None, calib_data=renamed))
    assert other.manifest.created > "2026-01-02T03:04:05Z"
    assert other.manifest.digest == result.manifest.digest


def test_an_artifact_is_not_replaced_by_accident(result: ComputeResult) -> None:
    before = content(result.path)
    with pytest.raises(errors.OutputExists, match="already holds an artifact"):
        compute_artifact(options(result.path))
    assert content(result.path) == before
    again = compute_artifact(options(result.path, force=True))
    assert again.manifest.digest == result.manifest.digest


@pytest.mark.parametrize("phase", ["load", "capture", "fit", "write"])
def test_interrupts_leave_none(tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the capture took so short that nothing of it was saved."""
    monkeypatch.setattr(checkpoint, "MIN_SECONDS", float("inf"))

    def interrupt(done: int, total: int, text: str) -> None:
        if text == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_artifact(options(tmp_path / "a/out", calib_tokens=100), progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_no_unverified_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken solver: eigenvectors that are not orthogonal."""
    solve = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda one: (solve(one)[0], solve(one)[1] * 1.01))
    with pytest.raises(errors.ComputeFailed, match="failed its own verification: "):
        compute_artifact(options(tmp_path / "out", calib_tokens=200))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"method": "magic"}, errors.UsageError, "'magic'"),
        ({"calib_tokens": 0}, errors.UsageError, "above 0"),
        ({"seq_len": 0}, errors.UsageError, "above 0"),
        ({"seq_len": 4096}, errors.UsageError, "2048"),
        ({"calib_data": Path("nothing.txt")}, errors.PathNotFound, "nothing.txt"),
        ({"model": "./nowhere"}, errors.PathNotFound, "nowhere"),
        ({"model_name": "../up"}, errors.InvalidName, "up"),
        ({"device": "toaster"}, errors.UsageError, "toaster"),
        ({"device": "cuda:99"}, errors.UnsupportedMachine, "cuda:99"),
        ({"recipe": RECIPE.model_copy(update={"group_size": 48})}, errors.UsageError, "48"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, changes: dict[str, object], error: type[errors.OscarZooError], text: str
) -> None:
    with pytest.raises(error) as caught:
        compute_artifact(options(tmp_path / "out", **changes))
    assert text in caught.value.message
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_heads_of_a_width_without_hadamard_matrix_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd", head_dim=88)
    with pytest.raises(errors.UnsupportedModel, match="heads of 88 channels") as refusal:
        compute_artifact(options(tmp_path / "out", model=str(model), recipe=RECIPE))
    assert "88" not in (refusal.value.hint or "") and "96" in (refusal.value.hint or "")


def test_the_prompt_hash_is_of_the_token_lists(result: ComputeResult) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    stream: list[int] = []
    for document in TEXT.read_text("utf-8").split("<|endoftext|>"):
        ids = tokenizer(document.strip("\n"), verbose=False)["input_ids"]
        stream += [*ids, tokenizer.eos_token_id]
    lists = [stream[0:120], stream[120:240], stream[240:300]]
    digest = hashlib.sha256(json.dumps(lists, separators=(",", ":")).encode()).hexdigest()
    assert result.manifest.fit.calibration is not None
    assert result.manifest.fit.calibration.prompts_sha256 == digest


PACKAGED = (
    Path(__file__).resolve().parents[2] / "manifests/Qwen3-8B/seq20000_prompt83_group128.json"
)
FILES = {"a.pt": b"new a", "oscar.json": b"{}"}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A folder with a real manifest and the files it lists."""
    manifest = Manifest.from_bytes(PACKAGED.read_bytes(), registry=True)
    manifest = manifest.model_copy(update={"registry": None})
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "oscar.json").write_bytes(manifest.to_bytes())
    for file in manifest.files:
        (folder / file.path).write_bytes(b"old")
    return folder


def test_an_absent_or_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a/b/c", tmp_path / "empty"):
        write_folder(target, FILES, force=False)
        assert content(target) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"a", "empty"}


def test_only_an_artifact_is_replaced_and_only_on_demand(artifact: Path) -> None:
    before = content(artifact)
    with pytest.raises(errors.OutputExists, match="already holds an artifact"):
        write_folder(artifact, FILES, force=False)
    (artifact / "notes.txt").write_text("mine")
    with pytest.raises(errors.OutputExists, match=r"notes\.txt"):
        write_folder(artifact, FILES, force=True)
    (artifact / "notes.txt").unlink()
    assert content(artifact) == before
    write_folder(artifact, FILES, force=True)
    assert content(artifact) == FILES
    assert [path.name for path in artifact.parent.iterdir()] == ["out"]
    (artifact / "oscar.json").rename(artifact / "cat.jpg")
    with pytest.raises(errors.OutputExists, match="other files"):
        write_folder(artifact, FILES, force=True)
    assert (artifact / "cat.jpg").exists()


def test_a_full_disk_leaves_the_old_artifact(artifact: Path) -> None:
    before, at = content(artifact), 0
    while True:
        at += 1
        failure = Injection(at, raise_error())
        try:
            with failure.active():
                write_folder(artifact, FILES, force=True)
        except errors.StorageError as error:
            assert "No space left" in error.message
        if not failure.fired:
            break
        if content(artifact) != before:
            assert content(artifact) == FILES  # the failure came after the rename
            break
    assert at > 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_call_leaves_nothing_half_written(tmp_path: Path) -> None:
    for at in itertools.count(1):
        target = tmp_path / str(at) / "out"
        killed = killed_at(at, functools.partial(write_folder, target, FILES, force=False))
        assert not target.exists() or content(target) == FILES
        if not killed:
            break
    assert at > 5
    assert content(target) == FILES


def test_what_a_killed_run_left_goes_beside_an_artifact_too(tmp_path: Path, artifact: Path) -> None:
    """A run that is killed behind its artifact, while it writes the report."""
    killed = (
        "import os, pathlib, signal, sys\n"
        "from oscar_zoo.artifact import durable\n"
        "durable.temp_path(pathlib.Path(sys.argv[1])).write_bytes(b'half')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path], check=False)
    assert len(list(tmp_path.glob(".tmp.*"))) == 1
    with pytest.raises(errors.OutputExists):
        check_target(artifact, force=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
