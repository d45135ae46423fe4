"""Tensors that share a storage: read as torch reads them, or refused."""

import io
from itertools import product
from typing import Any

import numpy as np
import pytest
from hostile_archives import Record, archive
from hostile_pickles import Tensor, op, top

from oscar_zoo.artifact.formats import hadamard
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.errors import MalformedFile

RECORD = hadamard(16).astype("<f4")
WHOLE = Tensor("0", (16, 16))
VIEWS = {
    "whole": WHOLE,
    "corner": Tensor("0", (8, 8)),
    "corner-of-256": Tensor("0", (8, 8), numel=256),
    "stepped": Tensor("0", (8, 8), stride=(16, 1), numel=256),
    "transposed": Tensor("0", (16, 16), stride=(1, 16)),
    "expanded": Tensor("0", (16, 16), stride=(0, 1)),
    "second-half": Tensor("0", (8, 8), numel=256, offset=128),
    "negative-offset": Tensor("0", (8, 8), numel=256, offset=-1),
    "past-the-end": Tensor("0", (16, 16), offset=1),
    "too-large": Tensor("0", (32, 32)),
    "too-large-of-256": Tensor("0", (32, 32), numel=256),
    "on-a-gpu": Tensor("0", (16, 16), location="cuda:0"),
}


def file_of(first: Tensor, second: Tensor) -> bytes:
    """A Hadamard file whose two layers are views of one record of 256 numbers."""
    layers = {i: {"layer_id": i, "rotation": view} for i, view in enumerate((first, second))}
    content = {
        "data.pkl": b"\x80\x02" + op(top(objective="hadamard", layers=layers)) + b".",
        "byteorder": b"little",
        "data/0": RECORD.tobytes(),
        "version": b"3\n",
    }
    return archive([Record(f"archive/{name}", data) for name, data in content.items()])


def read_by_torch(data: bytes) -> list[Any] | None:
    """The matrices as torch reads them, or `None` where it raises. These files are our own."""
    torch = pytest.importorskip("torch")
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except RuntimeError:
        return None
    return [value["layers"][i]["rotation"].numpy() for i in (0, 1)]


def read_by_us(data: bytes) -> list[Any] | None:
    try:
        return [layer.forward for layer in read_rotation(data, what="shared").layers]
    except MalformedFile:
        return None


@pytest.mark.parametrize("names", list(product(VIEWS, VIEWS)), ids="-then-".join)
def test_views_of_one_storage_are_read_as_by_torch_or_refused(names: tuple[str, str]) -> None:
    data = file_of(*(VIEWS[name] for name in names))
    ours = read_by_us(data)
    if ours is not None:
        theirs = read_by_torch(data)
        assert theirs is not None
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            assert mine.tobytes() == np.ascontiguousarray(other).tobytes()


def test_one_shape_of_one_storage_is_read() -> None:
    ours = read_by_us(file_of(WHOLE, WHOLE))
    assert ours is not None
    assert all(np.array_equal(matrix, RECORD) for matrix in ours)
