"""The fingerprint: published test vectors, honest files always pass, every listed mistake is
seen."""

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_artifacts as tiny
from numpy.typing import NDArray

from oscar_zoo.artifact import statistics, tensor_file
from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard, pbr_permutation
from oscar_zoo.artifact.statistics import (
    FingerprintMatch,
    compare,
    fingerprint_bytes,
    probe_signs,
    read_fingerprint,
)
from oscar_zoo.errors import MalformedFile, UsageError

MODEL = "Qwen/Qwen3-8B"
REVISION = "0" * 40
D = 64
Matrix = NDArray[np.float64]


def compared(rotations: RotationSet, fingerprint: Any, model: str = MODEL) -> FingerprintMatch:
    found = compare(rotations, fingerprint, model, None)
    assert found is not None
    return found


def signs(vector: Matrix) -> str:
    return "".join("+" if value > 0 else "-" for value in vector[:32])


def test_sign_vectors_are_the_published_ones() -> None:
    got = signs(probe_signs(MODEL, REVISION, "qq", 0, None, 0, 128))
    assert got == "--++-----++---+----++-+-+--++--+"
    got = signs(probe_signs(MODEL, REVISION, "vv", 35, 7, 1, 128))
    assert got == "++++++++--++---++-+++++-+---+--+"


def test_sign_vectors_depend_on_everything() -> None:
    base = (MODEL, REVISION, "qq", 0, None, 0, 512)
    assert np.array_equal(probe_signs(*base)[:100], probe_signs(*base[:-1], 100))
    for place, other in enumerate(["other/model", None, "kk", 1, 0, 1]):
        changed = (*base[:place], other, *base[place + 1 :])
        assert 150 < (probe_signs(*base) != probe_signs(*changed)).sum() < 362  # type: ignore[arg-type]


def test_heads_are_compared_one_by_one() -> None:
    stacks = tiny.covariances(2, 3, d=32)
    layers = tuple(tiny.rotated(stack, layer) for layer, stack in zip((3, 7), stacks, strict=True))
    rotations = RotationSet(2, "qqt_r_h_pbr", "kv_head", "oscar", True, False, layers)
    fingerprint = read_fingerprint(fingerprint_bytes({"qq": stacks}, (3, 7), MODEL, None))
    assert compared(rotations, fingerprint).worst < statistics.LIMIT
    broken = layers[1].forward.copy()
    broken[2, :, 0] *= -1
    bad = compared(tiny.change(rotations, forward=broken), fingerprint)
    assert (bad.layer, bad.head) == (7, 2)


@pytest.mark.parametrize("composition", ["plain", "br", "r_h", "h_r_pbr", "h_pbr_r", "r_h_pbr"])
def test_compositions_are_undone(composition: str) -> None:
    covariance = tiny.covariances(2, d=D, seed=2)[0]
    values, u = np.linalg.eigh(covariance)
    h, p = hadamard(D), np.eye(D)[:, pbr_permutation(values)]
    products = {
        "plain": u,
        "br": u @ p,
        "r_h": u @ h,
        "h_r_pbr": h @ u @ p,
        "h_pbr_r": h @ p @ u,
        "r_h_pbr": u @ h @ p,
    }
    matrix = products[composition].astype(np.float32)
    layer = LayerTransform(0, matrix, matrix, eigenvalues=values.astype(np.float32))
    fingerprint = read_fingerprint(fingerprint_bytes({"qq": covariance[None]}, (0,), MODEL, None))
    objective = f"qqt_{composition}"
    rotations = RotationSet(1, objective, "layer", "oscar", True, False, (layer,))
    assert compared(rotations, fingerprint).worst < statistics.LIMIT
    unknown = replace(rotations, objective="qqt_pbr")
    assert compare(unknown, fingerprint, MODEL, None) is None
    bare = replace(rotations, layers=(replace(layer, eigenvalues=None),))
    assert compare(bare, fingerprint, MODEL, None) is None


@pytest.mark.parametrize("clamp", [True, False])
def test_tied_eigenvalues_allow_both_orders(clamp: bool) -> None:
    rows = np.random.default_rng(4).standard_normal((20, D))
    covariance = rows.T @ rows
    values, u = np.linalg.eigh(covariance)
    clamped = np.where(np.arange(D) < D - 20, 0, values)
    matrix = (u @ hadamard(D))[:, pbr_permutation(clamped if clamp else values)].astype(np.float32)
    layer = LayerTransform(0, matrix, matrix, eigenvalues=clamped.astype(np.float32))
    rotations = RotationSet(1, "qqt_r_h_pbr", "layer", "oscar", True, False, (layer,))
    fingerprint = read_fingerprint(fingerprint_bytes({"qq": covariance[None]}, (0,), MODEL, None))
    assert compared(rotations, fingerprint).worst < statistics.LIMIT


def test_nothing_to_compare_is_none_and_other_shapes_are_infinite() -> None:
    matrices = tiny.covariances(2)
    fingerprint = read_fingerprint(fingerprint_bytes({"qq": matrices}, (0, 1), MODEL, None))
    assert compare(tiny.hadamard_set(), fingerprint, MODEL, None) is None
    assert compare(tiny.rotation_set("sst_r_h_pbr"), fingerprint, MODEL, None) is None
    assert compare(tiny.partnered_set(), fingerprint, MODEL, None) is None
    assert np.isinf(compared(tiny.rotation_set(layers=(0, 1, 2)), fingerprint).worst)


def test_the_file_is_canonical_and_plain_safetensors() -> None:
    matrices = {"sst": tiny.covariances(2, seed=2), "qq": tiny.covariances(2)}
    data = fingerprint_bytes(matrices, (0, 1), MODEL, None)
    assert data == fingerprint_bytes(dict(sorted(matrices.items())), (0, 1), MODEL, None)
    numpy_reader = pytest.importorskip("safetensors.numpy")
    theirs, ours = numpy_reader.load(data), read_fingerprint(data)
    assert (
        theirs.keys()
        == ours.keys()
        == {f"{m}.{p}" for m in matrices for p in ("trace", "diag", "sketch")}
    )
    assert all(np.array_equal(theirs[name], ours[name]) for name in ours)
    with pytest.raises(UsageError):
        fingerprint_bytes({"xx": tiny.covariances(2)}, (0, 1), MODEL, None)
    with pytest.raises(UsageError):
        fingerprint_bytes(matrices, (0,), MODEL, None)


def raw(header: str, body: int = 8) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + bytes(body)


def one(shape: str = "[2]", offsets: str = "[0,8]", dtype: str = "F32", more: str = "") -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{more}}}}}'


ENTRY = one()[5:-1]
BAD_FILES = {
    "empty": (b"", "safetensors.header"),
    "short": (b"\1\0\0\0", "safetensors.header"),
    "long header": (struct.pack("<Q", 1 << 60) + b"{}", "safetensors.header"),
    "no tensors": (raw("{}", 0), "safetensors.header"),
    "a list": (raw("[]", 0), "safetensors.header"),
    "duplicate": (raw(f'{{"a":{ENTRY},"a":{ENTRY}}}'), "json.duplicate_key"),
    "not json": (raw("{a}"), "json.syntax"),
    "nan": (raw('{"a":NaN}'), "json.number"),
    "metadata": (raw(f'{{"__metadata__":{{"a":"b"}},"a":{ENTRY}}}'), "safetensors.entry"),
    "extra field": (raw(one(more=',"x":1')), "safetensors.entry"),
    "dtype": (raw(one("[1]", dtype="F64")), "safetensors.dtype"),
    "zero axis": (raw(one("[0,2]", "[0,0]"), 0), "safetensors.shape"),
    "huge axis": (raw(one("[1099511627776]")), "safetensors.shape"),
    "bool axis": (raw(one("[true,2]")), "safetensors.shape"),
    "one offset": (raw(one(offsets="[0]")), "safetensors.entry"),
    "negative": (raw(one(offsets="[-8,0]")), "safetensors.entry"),
    "gap": (raw(one(offsets="[4,12]"), 12), "safetensors.gap"),
    "beyond": (raw(one(), 4), "safetensors.gap"),
    "trailing": (raw(one(), 9), "safetensors.gap"),
    "overlap": (raw(f'{{"a":{ENTRY},"b":{ENTRY}}}'), "safetensors.gap"),
    "size": (raw(one("[3]")), "safetensors.gap"),
    "name": (raw(one()), "stats.name"),
    "alone": (raw(one().replace('"a"', '"qq.trace"')), "stats.name"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_fingerprints_are_refused(name: str) -> None:
    data, reason = BAD_FILES[name]
    with pytest.raises(MalformedFile) as caught:
        read_fingerprint(data)
    assert caught.value.reason == reason


def test_shapes_and_values_of_a_fingerprint() -> None:
    good = read_fingerprint(fingerprint_bytes({"qq": tiny.covariances(2)}, (0, 1), MODEL, None))
    for name, array, reason in (
        ("qq.diag", good["qq.diag"][:1], "stats.shape"),
        ("qq.sketch", good["qq.sketch"][:, :1], "stats.shape"),
        ("qq.trace", np.full(2, np.nan, np.float32), "stats.values"),
    ):
        with pytest.raises(MalformedFile) as caught:
            read_fingerprint(tensor_file.write({**good, name: np.ascontiguousarray(array)}))
        assert caught.value.reason == reason


@pytest.mark.parametrize("bad", [0, 1])
def test_one_wrong_layer_is_found_wherever_it_stands(bad: int) -> None:
    matrices = {"qq": tiny.covariances(2, seed=1)}
    good = tiny.rotation_set(matrices=matrices["qq"])
    fingerprint = read_fingerprint(fingerprint_bytes(matrices, tiny.LAYERS, "model", None))
    other = tiny.rotated(tiny.covariances(1, seed=9)[0], bad)
    layers = tuple(other if layer.layer_id == bad else layer for layer in good.layers)
    found = compared(replace(good, layers=layers), fingerprint, "model")
    assert found.layer == bad
    assert min(found.errors) > statistics.LIMIT
    assert compared(good, fingerprint, "model").worst < statistics.LIMIT
