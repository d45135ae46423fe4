"""The whole computation on the example model: what is written, what it says, and what happens when
it cannot be."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import EXAMPLE, write_model

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute.capture import state
from oscar_zoo.compute.job import ComputeOptions, ComputeResult, compute_artifact
from oscar_zoo.errors import (
    ComputeFailed,
    InvalidName,
    OscarZooError,
    OutputExists,
    PathNotFound,
    UnsupportedMachine,
    UnsupportedModel,
    UsageError,
)

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
TOKENS = 300


def options(output_dir: Path | None, **changes: object) -> ComputeOptions:
    base = ComputeOptions(
        model=str(EXAMPLE),
        model_name="tiny-qwen3-hard",
        calib_data=TEXT,
        calib_tokens=TOKENS,
        recipe=RECIPE,
        seq_len=120,
        method="oscar",
        output_dir=output_dir,
        created="2026-01-02T03:04:05Z",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComputeResult]:
    yield compute_artifact(options(tmp_path_factory.mktemp("computed") / "out"))


def test_the_folder_holds_a_verified_artifact(result: ComputeResult) -> None:
    files = content(result.path)
    assert set(files) == {
        "k_rotation_qqt_r_h_pbr.pt",
        "v_rotation_sst_r_h_pbr.pt",
        "statistics.safetensors",
        "oscar.json",
    }
    outcome = verify_files(files, strict=True)
    assert isinstance(outcome, Verified)
    assert outcome.level == "statistics"
    assert outcome.digest == result.manifest.digest == result.verified.digest
    assert result.manifest == Manifest.from_bytes(files["oscar.json"])


def test_the_manifest_says_what_was_done(result: ComputeResult) -> None:
    manifest = result.manifest
    assert manifest.id == str(result.artifact_id) == "tiny-qwen3-hard/seq300_prompt3_group64"
    assert manifest.created == "2026-01-02T03:04:05Z"
    assert manifest.fit.estimator is not None
    assert (manifest.fit.estimator.k.id, manifest.fit.estimator.v.id) == ("qqt/1", "sst/1")
    assert manifest.fit.composition is not None
    assert manifest.fit.composition.id == "r_h_pbr"
    calibration = manifest.fit.calibration
    assert calibration is not None
    assert (calibration.tokens_requested, calibration.tokens_used, calibration.sequences) == (
        TOKENS,
        TOKENS,
        3,
    )
    assert calibration.dataset == "calibration.txt"
    coverage = manifest.fit.coverage
    assert coverage is not None
    assert (coverage.layers, coverage.q_heads, coverage.kv_heads) == (4, 4, 2)
    assert (coverage.tokens_min, coverage.tokens_max) == (TOKENS, TOKENS)
    assert manifest.fit.numerics is not None
    assert (manifest.fit.numerics.forward_dtype, manifest.fit.numerics.accumulate) == (
        "bfloat16",
        "float64",
    )
    assert manifest.model.config_sha256 == sha256_hex((EXAMPLE / "config.json").read_bytes())
    assert manifest.recipe == RECIPE
    assert manifest.provenance.kind == "computed"
    assert (manifest.license.artifact, manifest.license.model) == (None, None)


def test_both_files_carry_the_id_of_the_fit(result: ComputeResult) -> None:
    files = content(result.path)
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        calibration = read_rotation(files[name], what=name).calibration
        assert calibration["generation_id"] == result.manifest.fit.fit_id
        assert calibration["model_path"] == result.manifest.model.id == "tiny-qwen3-hard"
        assert calibration["tokens"] == TOKENS


def test_standard_torch_reads_the_files(result: ComputeResult) -> None:
    for path in result.path.glob("*.pt"):
        payload = torch.load(path, weights_only=True)
        rotation = payload["layers"][3]["rotation"].double()
        assert torch.allclose(rotation @ rotation.T, torch.eye(64, dtype=torch.float64), atol=2e-7)


def test_no_file_names_this_machine(result: ComputeResult) -> None:
    secrets = [str(EXAMPLE.parent), str(result.path.parent), socket.gethostname(), str(Path.home())]
    for name, data in content(result.path).items():
        for secret in secrets:
            assert len(secret) < 4 or secret.encode() not in data, f"{name} holds {secret}"


def test_the_same_options_give_the_same_bytes(result: ComputeResult, tmp_path: Path) -> None:
    again = compute_artifact(options(tmp_path / "again"))
    assert content(again.path) == content(result.path)


def test_time_and_file_name_are_no_part_of_the_digest(
    result: ComputeResult, tmp_path: Path
) -> None:
    renamed = tmp_path / "renamed.txt"
    renamed.write_bytes(TEXT.read_bytes())
    other = compute_artifact(options(tmp_path / "out", created=None, calib_data=renamed))
    assert other.manifest.created > "2026-01-02T03:04:05Z"
    assert other.manifest.digest == result.manifest.digest


def test_other_data_gives_another_fit(result: ComputeResult, tmp_path: Path) -> None:
    other = compute_artifact(options(tmp_path / "out", seed=1))
    assert other.manifest.fit.fit_id != result.manifest.fit.fit_id
    assert other.manifest.digest != result.manifest.digest


def test_the_default_folder_is_named_after_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = compute_artifact(options(None, calib_tokens=300, method="hadamard"))
    assert (tmp_path / "tiny-qwen3-hard/seq300_prompt3_group64-hadamard/oscar.json").is_file()
    assert result.artifact_id.tag == "seq300_prompt3_group64-hadamard"


def test_hadamard_needs_no_statistics(tmp_path: Path) -> None:
    result = compute_artifact(options(tmp_path / "out", method="hadamard"))
    assert set(content(result.path)) == {
        "k_rotation_hadamard.pt",
        "v_rotation_hadamard.pt",
        "oscar.json",
    }
    assert (result.manifest.fit.method, result.manifest.fit.estimator) == ("hadamard", None)
    assert result.manifest.fit.calibration is None
    assert result.verified.k is not None
    forward = result.verified.k.layers[0].forward.astype(np.float64)
    assert np.abs(np.abs(forward) - 1 / 8).max() < 1e-8
    assert np.abs(forward @ forward.T - np.eye(64)).max() < 2e-7


def test_short_data_is_used_up_and_said(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("All work and no play. " * 40)
    result = compute_artifact(options(tmp_path / "out", calib_data=text, calib_tokens=5000))
    used = result.manifest.fit.calibration.tokens_used  # type: ignore[union-attr]
    assert used is not None
    assert 100 < used < 5000
    assert result.notes[0] == f"the data ended after {used:,} of 5,000 tokens."
    assert "are few" in result.notes[1]
    assert result.artifact_id.tag.startswith(f"seq{used}_")


def test_a_model_with_grouped_queries_and_small_heads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "random", layers=3, heads=8, kv_heads=2, head_dim=16)
    recipe = ServingRecipe(group_size=16, clip=Clip(k=0, v=0))
    changes = {"model": str(model), "model_name": "random", "recipe": recipe, "seq_len": 200}
    result = compute_artifact(options(tmp_path / "out", **changes))
    assert result.manifest.model.num_q_heads == 8
    assert result.verified.k is not None
    assert result.verified.k.layer_ids == (0, 1, 2)


def test_an_artifact_is_not_replaced_by_accident(result: ComputeResult) -> None:
    before = content(result.path)
    with pytest.raises(OutputExists, match="already holds an artifact"):
        compute_artifact(options(result.path))
    assert content(result.path) == before
    again = compute_artifact(options(result.path, force=True))
    assert again.manifest.digest == result.manifest.digest


@pytest.mark.parametrize("phase", ["load", "capture", "fit", "write"])
def test_an_interrupt_leaves_nothing(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the capture took so short that nothing of it was saved."""
    monkeypatch.setattr(state, "MIN_SECONDS", float("inf"))

    def interrupt(done: int, total: int, text: str) -> None:
        if text == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_artifact(options(tmp_path / "a/out", calib_tokens=100), progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_result_that_fails_verification_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken solver: eigenvectors that are not orthogonal."""
    solve = torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda matrix: (solve(matrix)[0], solve(matrix)[1] * 1.01)
    )
    with pytest.raises(ComputeFailed, match="failed its own verification: "):
        compute_artifact(options(tmp_path / "out", calib_tokens=200))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"method": "magic"}, UsageError, "'magic'"),
        ({"calib_tokens": 0}, UsageError, "above 0"),
        ({"seq_len": 0}, UsageError, "above 0"),
        ({"seq_len": 4096}, UsageError, "2048"),
        ({"calib_data": Path("nothing.txt")}, PathNotFound, "nothing.txt"),
        ({"model": "./nowhere"}, PathNotFound, "nowhere"),
        ({"model_name": "../up"}, InvalidName, "up"),
        ({"device": "toaster"}, UsageError, "toaster"),
        ({"device": "cuda:99"}, UnsupportedMachine, "cuda:99"),
        ({"recipe": RECIPE.model_copy(update={"group_size": 48})}, UsageError, "48"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, changes: dict[str, object], error: type[OscarZooError], text: str
) -> None:
    with pytest.raises(error) as caught:
        compute_artifact(options(tmp_path / "out", **changes))
    assert text in caught.value.message
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_heads_of_a_width_that_is_no_power_of_two(tmp_path: Path) -> None:
    model = write_model(tmp_path / "wide", head_dim=80)
    recipe = RECIPE.override(group_size=40)
    computed = compute_artifact(options(tmp_path / "out", model=str(model), recipe=recipe))
    assert computed.verified.level == "statistics"
    composition = computed.manifest.fit.composition
    assert composition is not None and composition.hadamard == "paley"


def test_heads_of_a_width_without_hadamard_matrix_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd", head_dim=88)
    with pytest.raises(UnsupportedModel, match="heads of 88 channels") as refusal:
        compute_artifact(options(tmp_path / "out", model=str(model), recipe=RECIPE))
    assert "88" not in (refusal.value.hint or "") and "96" in (refusal.value.hint or "")


def test_the_prompt_hash_is_of_the_token_lists(result: ComputeResult) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    stream: list[int] = []
    for document in TEXT.read_text("utf-8").split("<|endoftext|>"):
        stream += [
            *tokenizer(document.strip("\n"), verbose=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        if len(stream) > TOKENS:
            break
    lists = [stream[0:120], stream[120:240], stream[240:300]]
    digest = hashlib.sha256(json.dumps(lists, separators=(",", ":")).encode()).hexdigest()
    assert result.manifest.fit.calibration is not None
    assert result.manifest.fit.calibration.prompts_sha256 == digest
