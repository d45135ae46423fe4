"""Mutants of good files: always one of the outcomes, and what is accepted reads the same through
torch.load."""

from __future__ import annotations

import functools
import io
from typing import get_args

import numpy as np
import pytest
import tiny_rotations as tiny
from hostile_archives import Record, archive, good_records
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.outcome import Outcome, Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.errors import MalformedFile

EXAMPLES = settings(max_examples=250, deadline=None)
WORDS = st.sampled_from(
    [b"}", b"(", b")", b"t", b"u", b"s", b"q\0", b"h\0", b"N", b"\x88", b"K\1", b"R", b"Q", b"."]
)


@functools.cache
def good() -> tuple[bytes, ...]:
    sets = (tiny.rotation_set(), tiny.hadamard_set(), tiny.per_head_set(), tiny.partnered_set())
    return tuple(map(rotation_bytes, sets))


def read(data: bytes) -> RotationSet | None:
    """The set, or `None` when refused; any other exception is a bug."""
    try:
        return read_rotation(data, what="mutant")
    except MalformedFile:
        return None


def assert_torch_agrees(data: bytes, found: RotationSet) -> None:
    torch = pytest.importorskip("torch")
    value = torch.load(io.BytesIO(data), weights_only=True)
    assert value["format_version"] == found.format_version
    assert value["objective"] == found.objective
    assert sorted(value["layers"]) == list(found.layer_ids)
    for layer in found.layers:
        entry = value["layers"][layer.layer_id]
        assert entry["rotation"].numpy().tobytes() == layer.forward.tobytes()
        for name, array in (
            ("q_rotation", layer.partner),
            ("k_mean", layer.mean),
            ("eigenvalues", layer.eigenvalues),
        ):
            if name in entry and entry[name] is not None:
                assert array is not None
                assert entry[name].numpy().tobytes() == array.tobytes()


@EXAMPLES
@given(st.integers(0, 3), st.data())
def test_a_changed_byte_is_an_outcome_and_is_refused(which: int, data: st.DataObject) -> None:
    original = good()[which]
    position = data.draw(st.integers(0, len(original) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda byte: byte != original[position]))
    mutant = original[:position] + bytes([value]) + original[position + 1 :]
    outcome = verify_files({"k_rotation.pt": mutant})
    assert isinstance(outcome, get_args(Outcome))
    found = read(mutant)
    if found is not None:
        assert_torch_agrees(mutant, found)


@EXAMPLES
@given(st.integers(0, 3), st.data())
def test_a_cut_hole_or_repeat_is_refused(which: int, data: st.DataObject) -> None:
    original = good()[which]
    start = data.draw(st.integers(0, len(original) - 1))
    end = data.draw(st.integers(start + 1, len(original)))
    block = data.draw(st.sampled_from([b"", bytes(end - start), original[start:end] * 2]))
    mutant = original[:start] + block + original[end:]
    assert mutant == original or read(mutant) is None


@EXAMPLES
@given(st.integers(0, 3), st.data())
def test_a_changed_pickle_with_right_checksums_reads_as_torch_reads_it(
    which: int, data: st.DataObject
) -> None:
    records = good_records(good()[which])
    code = records[0].content
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(2, len(code) - 1))
        removed = data.draw(st.integers(0, 3))
        added = data.draw(
            st.one_of(WORDS, st.binary(max_size=3), st.just(code[start : start + 20]))
        )
        code = code[:start] + added + code[start + removed :]
    records[0].content = code
    mutant = archive(records)
    assert isinstance(verify_files({"k_rotation.pt": mutant}), get_args(Outcome))
    found = read(mutant)
    if found is not None:
        assert_torch_agrees(mutant, found)


@EXAMPLES
@given(st.data())
def test_changed_numbers_with_right_checksums_read_as_torch_reads_them(data: st.DataObject) -> None:
    records = good_records(good()[data.draw(st.integers(0, 3))])
    index = data.draw(
        st.sampled_from([i for i, r in enumerate(records) if "data/" in str(r.name)][:-1])
    )
    content = bytearray(records[index].content)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    records[index] = Record(
        records[index].name, bytes(content), flags=data.draw(st.sampled_from([0, 8, 0x800, 0x808]))
    )
    mutant = archive(records, **({"zip64": 0} if data.draw(st.booleans()) else {}))
    found = read(mutant)
    # 0x3XXXXXXX of a serialization id may no longer be digits; everything else still parses
    assert found is not None or "serialization" in str(records[index].name)
    if found is not None:
        assert_torch_agrees(mutant, found)
        outcome = verify_files({"k_rotation.pt": mutant})
        assert isinstance(outcome, get_args(Outcome))
        if isinstance(outcome, Verified):
            forward = found.layers[0].forward.astype(np.float64)
            partner = found.layers[0].partner.astype(np.float64)
            assert np.abs(forward @ np.swapaxes(partner, -2, -1) - np.eye(tiny.D)).max() <= 5e-6
