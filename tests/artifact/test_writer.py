"""The canonical file: same arrays, same bytes; nothing lost; torch reads it."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_artifacts as tiny

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.reader import GROUPINGS, read_rotation
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.errors import MalformedFile, UsageError

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SETS: dict[str, Callable[[], RotationSet]] = {
    "v1": tiny.rotation_set,
    "v1-hadamard": tiny.hadamard_set,
    "v1-hybrid": lambda: tiny.rotation_set(layers=(3, 7, 11)),
    "v1-bare": lambda: without_eigenvalues(tiny.rotation_set()),
    "v2": tiny.per_head_set,
    "v2-bare": lambda: without_eigenvalues(tiny.per_head_set()),
    "v3-k": tiny.partnered_set,
    "v3-k-feedback": tiny.fed_back_set,
    "v3-v": lambda: tiny.partnered_set("v"),
    "v3-bare": lambda: without_eigenvalues(tiny.partnered_set()),
    "v3-orthogonal": lambda: replace(
        tiny.rotation_set(), format_version=3, objective="oscar2_flat", transform="flat", role="k"
    ),
}
CALIBRATION = {
    "accumulator_dtype": "float64",
    "created_at_unix": 1.5,
    "generation_id": "0123456789abcdef" * 2,
    "max_tokens": 70_000_000_000,
    "model_path": "org/modèle",
    "model_revision": None,
    "post_rope": True,
    "tokens": 40_000,
    "tp_size": 1,
}


def without_eigenvalues(rotations: RotationSet) -> RotationSet:
    return replace(
        rotations, layers=tuple(replace(layer, eigenvalues=None) for layer in rotations.layers)
    )


@pytest.mark.parametrize("name", SETS)
def test_read_gives_back_what_was_written(name: str) -> None:
    rotations = replace(SETS[name](), calibration=CALIBRATION)
    data = rotation_bytes(rotations)
    again = read_rotation(data, what=name)
    tiny.assert_same(again, rotations)
    assert rotation_bytes(again) == data


@pytest.mark.parametrize("name", SETS)
def test_torch_reads_it_and_we_read_what_torch_writes(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rotations = replace(SETS[name](), calibration=CALIBRATION)
    data = rotation_bytes(rotations)
    value = torch.load(io.BytesIO(data), weights_only=True)
    (tmp_path / "a.pt").write_bytes(data)
    mapped = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    for layer in rotations.layers:
        for loaded in (value, mapped):
            matrix = loaded["layers"][layer.layer_id]["rotation"].numpy()
            assert matrix.tobytes() == layer.forward.tobytes()
    torch.save(value, tmp_path / "other name.pt")
    written = (tmp_path / "other name.pt").read_bytes()
    tiny.assert_same(read_rotation(written, what="torch"), rotations)


def test_hadamard_layers_share_one_record() -> None:
    many = rotation_bytes(tiny.hadamard_set(layers=range(64), d=32))
    assert len(many) < 40_000 < 64 * 32 * 32 * 4


def test_the_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import sys, tiny_artifacts as t\nfrom oscar_zoo.artifact.writer import rotation_bytes\n"
        "for s in (t.rotation_set(), t.partnered_set()): sys.stdout.buffer.write(rotation_bytes(s))"
    )
    results = set()
    for seed in ("0", "424242"):
        own = {"PYTHONPATH": str(SUPPORT), "PYTHONHASHSEED": seed, "TZ": f"UTC{seed[0]}"}
        command = [sys.executable, "-c", code]
        results.add(subprocess.check_output(command, env=os.environ | own))
    assert len(results) == 1


def test_the_bytes_do_not_depend_on_memory_layout() -> None:
    rotations = tiny.rotation_set()
    fortran = tiny.change(rotations, forward=np.asfortranarray(rotations.layers[-1].forward))
    assert rotation_bytes(fortran) == rotation_bytes(rotations)


@pytest.mark.parametrize(
    ("rotations", "error"),
    [
        (tiny.change(tiny.rotation_set(), forward=np.eye(8)), UsageError),
        (replace(tiny.rotation_set(), grouping="kv_head"), UsageError),
        (replace(tiny.rotation_set(), format_version=max(GROUPINGS) + 1), UsageError),
        (replace(tiny.partnered_set(), role=None, objective="wush"), UsageError),
        (replace(tiny.rotation_set(), layers=tiny.rotation_set().layers[:1] * 2), UsageError),
        (replace(tiny.rotation_set(), calibration={"tokens": b"x"}), UsageError),
        (replace(tiny.rotation_set(), calibration={"who": 1}), MalformedFile),
        (replace(tiny.rotation_set(), objective="nonsense"), MalformedFile),
        (replace(tiny.rotation_set(), layers=()), MalformedFile),
    ],
)
def test_what_nobody_reads_is_not_written(rotations: RotationSet, error: type[Exception]) -> None:
    with pytest.raises(error):
        rotation_bytes(rotations)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"feedback": None}, "layers.feedback"),  # in one layer of all
        ({"feedback": np.zeros((tiny.HEADS, 3), np.float32)}, "tensor.shape"),
        ({"feedback": np.zeros((1, tiny.D * (tiny.D - 1) // 2), np.float32)}, "tensor.shape"),
    ],
)
def test_feedback_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedFile) as caught:
        rotation_bytes(tiny.change(tiny.fed_back_set(), **changes))
    assert caught.value.reason == reason


def test_only_keys_with_a_matrix_for_each_head_have_feedback() -> None:
    feedback = tiny.fed_back_set().layers[0].feedback
    for other in (tiny.partnered_set("v"), tiny.per_head_set(), tiny.rotation_set()):
        layers = tuple(replace(layer, feedback=feedback) for layer in other.layers)
        with pytest.raises(MalformedFile) as caught:
            rotation_bytes(replace(other, layers=layers))
        assert caught.value.reason == "schema.unknown_key"


def test_feedback_is_the_part_above_the_diagonal_and_asks_for_an_engine_that_has_it() -> None:
    made = tiny.fed_back_set()
    matrix, packed = made.layers[1].feedback_matrix, made.layers[1].feedback
    assert matrix is not None and packed is not None
    assert matrix.shape == (tiny.HEADS, tiny.D, tiny.D) and not np.tril(matrix).any()
    upper = np.triu_indices(tiny.D, 1)
    assert np.array_equal(matrix[:, *upper], packed.astype(np.float16))
    assert matrix[1, 0, 2] == packed[1, 1].astype(np.float16)
    assert made.requires == ("k_feedback", "k_mean", "k_partner", "per_head")
    assert tiny.partnered_set().requires == ("k_mean", "k_partner", "per_head")
