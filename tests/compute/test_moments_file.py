"""The moments file: nothing is lost, the same moments give the same bytes, and no file of others is
believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_moments import MODEL, add, describe, layer_rows, random_moments, records
from safetensors.torch import load_file

from oscar_zoo.artifact import strict_json, tensor_file
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.compute import coverage
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import (
    KEY,
    MAX_HEADER,
    SequenceRecord,
    load_moments,
    moments_bytes,
    parse_moments,
    save_moments,
)
from oscar_zoo.errors import ComputeFailed, MalformedFile, OscarZooError, PathNotFound, StorageError

COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens", "heads")


@pytest.fixture(scope="module")
def moments() -> Moments:
    return random_moments()


@pytest.fixture(scope="module")
def content(moments: Moments) -> bytes:
    return moments_bytes(moments, describe(moments))


def assert_same(got: Moments, want: Moments) -> None:
    """Equal to the bit, upper triangles apart."""
    assert got.geometry == want.geometry
    assert sorted(got.layers) == sorted(want.layers)
    for layer, mine in got.layers.items():
        theirs = want.layers[layer]
        assert [getattr(mine, name) for name in COUNTS] == [
            getattr(theirs, name) for name in COUNTS
        ]
        for name in (*ROW_SUMS, *WEIGHTED_SUMS, "wo"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one is None) == (other is None), name
            vector = one is None or one.dim() < 3
            assert vector or torch.equal(one.tril(), other.tril()), name
            assert not vector or one is None or torch.equal(one, other), name


def test_what_is_loaded_is_what_was_saved(moments: Moments, tmp_path: Path) -> None:
    info = describe(moments)
    said = save_moments(tmp_path / "moments.safetensors", moments, info)
    data = (tmp_path / "moments.safetensors").read_bytes()
    assert (said.sha256, said.size, said.location) == (
        sha256_hex(data),
        len(data),
        "moments.safetensors",
    )
    got, found = load_moments(tmp_path / "moments.safetensors")
    assert found == info
    assert_same(got, moments)
    got.layers[0].add(
        *(
            torch.from_numpy(x)
            for x in (layer_rows(0).query, layer_rows(0).key, layer_rows(0).value)
        )
    )
    assert [path.name for path in tmp_path.iterdir()] == ["moments.safetensors"]


def test_the_same_moments_give_the_same_bytes(moments: Moments, content: bytes) -> None:
    assert moments_bytes(random_moments(), describe(moments)) == content
    layers = dict(reversed(moments.layers.items()))
    assert moments_bytes(replace(moments, layers=layers), describe(moments)) == content


def test_other_readers_see_lower_triangles(
    moments: Moments, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    tensors = load_file(tmp_path / "m.safetensors")
    assert tensors["qq"].shape == (2, 2, 16 * 17 // 2)
    rows, columns = np.tril_indices(16)
    assert torch.equal(tensors["qq"][1, 0], moments.layers[2].qq[0, rows, columns])
    values = sum(tensor.numel() for tensor in tensors.values())
    assert values == 2 * 2 * (2 * 136 + 16 + 4 * 36 + 8 + 1)
    assert len(content) - 8 * values < 4096


def test_optional_sums_take_no_room_where_they_are_missing(content: bytes) -> None:
    moments = random_moments(weighted=False)
    for layer in moments.layers.values():
        layer.oo.zero_()
        layer.output_rows, layer.wo = 0, None
    data = moments_bytes(moments, describe(moments))
    assert {*tensor_file.read_with_metadata(data, what="m", max_header=MAX_HEADER)[0]} == {
        "qq", "kk", "k_sum", "vv", "v_sum"
    }  # fmt: skip
    assert_same(parse_moments(data)[0], moments)


def test_a_part_of_a_capture_resumes(tmp_path: Path) -> None:
    """One head, layers at different stages, one sequence of two."""
    part = Moments.zeros(MODEL.geometry, heads=[1])
    first = layer_rows(0)
    part.layers[0].add(
        *(torch.from_numpy(x) for x in (first.query[2:], first.key[1:], first.value[1:]))
    )
    info = describe(part, records(200), partial=True)
    save_moments(tmp_path / "part", part, info)
    got, found = load_moments(tmp_path / "part")
    assert found == info
    assert found.coverage is None
    assert_same(got, part)
    assert got.layers[2].tokens == 0


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=20))
def test_records_name_sequences(ids: list[int]) -> None:
    record = SequenceRecord.of(ids)
    assert record == SequenceRecord.of(tuple(ids))
    assert record.tokens == len(ids)
    assert record.sha256 == sha256_hex(json.dumps(ids, separators=(",", ":")).encode())


def broken(change: Callable[[LayerMoments], None]) -> Moments:
    moments = random_moments()
    change(moments.layers[2])
    return moments


def test_moments_that_are_not_what_they_are_described_as_are_not_saved(tmp_path: Path) -> None:
    whole = random_moments()
    info = describe(whole)
    path = tmp_path / "moments.safetensors"
    path.write_bytes(b"old")
    fewer = broken(
        lambda layer: layer.add(*(torch.ones(n, 1, d) for n, d in ((4, 16), (2, 16), (2, 8))))
    )
    unlike = Moments(MODEL.geometry.model_copy(update={"num_layers": 4}), whole.layers)

    def spoil(layer: LayerMoments) -> None:
        layer.kk[0, 0, 0] = torch.nan

    def blind(layer: LayerMoments) -> None:
        layer.wo = None

    def headless(layer: LayerMoments) -> None:
        layer.heads = (0, 3)

    for moments, wrong, message in (
        (fewer, info, "layer 2 saw 201 tokens, another layer 200"),
        (whole, info.model_copy(update={"sequences": records(150)}), "200 tokens are described"),
        (whole, info.model_copy(update={"coverage": None}), "200 tokens are described"),
        (unlike, info, "another model"),
        (replace(whole, layers={}), info, "another model"),
        (broken(spoil), info.model_copy(update={"partial": True}), "layer 2: kk has NaN"),
        (broken(blind), info, "layer 2 has no output projection"),
        (broken(headless), info, "different KV heads"),
    ):
        with pytest.raises(ComputeFailed, match=message):
            save_moments(path, moments, wrong)
    assert path.read_bytes() == b"old"
    with pytest.raises(StorageError, match="cannot write"):
        save_moments(tmp_path / "missing" / "m", whole, info)


def rebuilt(content: bytes, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """The file with its description and tensors changed by `edit`, in place."""
    arrays, metadata = tensor_file.read_with_metadata(content, what="m", max_header=MAX_HEADER)
    description = json.loads(metadata[KEY])
    tensors: dict[str, Any] = {name: array.copy() for name, array in arrays.items()}
    edit(description, tensors)
    return tensor_file.write(tensors, {KEY: strict_json.canonical_bytes(description).decode()})


def drop(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["kk"]


def extra(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["M_q"] = tensors["kk"]


def square(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["vv"] = np.zeros((2, 2, 8, 8))


def narrow(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["qq"] = tensors["qq"][:, :1]


def poisoned(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["v_sum"][0, 0, 0] = np.inf


def huge_model(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["info"]["model"]["v_head_dim"] = 1 << 30


def other_layers(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][0]["id"] = 1


def twice(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][1]["id"] = 0


def other_heads(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["heads"] = [0, 2]


def no_layers(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"] = []


def more_tokens(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][1]["tokens"] = 400


def unweighted(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][1]["weighted_tokens"] = 0
    for name in ("sst_num", "sst_den"):
        tensors[name] = tensors[name][:1]


def negative(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][1]["tokens"] = -1


def unknown_key(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["info"]["note"] = "hello"


def version(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["schema"] = "oscar-zoo.moments/2"


def no_hash(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["info"]["sequences"][0]["sha256"] = "ab"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (drop, "moments.shape"),
        (extra, "moments.name"),
        (square, "moments.shape"),
        (narrow, "moments.shape"),
        (poisoned, "moments.values"),
        (huge_model, "moments.shape"),
        (other_layers, "moments.layers"),
        (twice, "moments.layers"),
        (no_layers, "moments.layers"),
        (other_heads, "moments.heads"),
        (more_tokens, "moments.coverage"),
        (unweighted, "moments.coverage"),
        (negative, "moments.schema"),
        (unknown_key, "moments.schema"),
        (no_hash, "moments.schema"),
        (version, "moments.version"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    content: bytes, edit: Callable[[dict[str, Any], dict[str, Any]], None], reason: str
) -> None:
    with pytest.raises(MalformedFile) as info:
        parse_moments(rebuilt(content, edit))
    assert info.value.reason == reason


def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    statistics = tensor_file.write({"qq.trace": np.ones(3, dtype=np.float32)})
    plain = tensor_file.write({"qq": np.ones((1, 1))}, {"format": "pt"})
    header = json.dumps({"__metadata__": {KEY: 3}}).encode()
    numbers = len(header).to_bytes(8, "little") + header
    for data, reason in (
        (b"", "file.empty"),
        (b"<!DOCTYPE html><html>", "file.html"),
        (b"PK\x03\x04" + b"\0" * 200, "safetensors.header"),
        (statistics, "safetensors.dtype"),
        (plain, "moments.schema"),
        (numbers, "safetensors.metadata"),
        (content + b"\0" * 8, "safetensors.gap"),
    ):
        with pytest.raises(MalformedFile) as info:
            parse_moments(data)
        assert info.value.reason == reason
    with pytest.raises(PathNotFound):
        load_moments(tmp_path / "missing")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(MalformedFile, match="symbolic link"):
        load_moments(tmp_path / "link")


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_damaged_bytes_give_an_error_or_complete_moments(
    content: bytes, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, 3000))
    damaged = bytearray(content)
    if data.draw(st.booleans()):
        damaged = damaged[:position]
    else:
        damaged[position] = data.draw(st.integers(0, 255))
    try:
        moments, info = parse_moments(bytes(damaged))
    except OscarZooError:
        return
    if not info.partial:
        coverage.check(moments, {"rows", "weighted", "outputs", "weights"})


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_one_changed_bit_of_the_content_is_noticed(content: bytes, data: st.DataObject) -> None:
    start = 8 + int.from_bytes(content[:8], "little")
    position = data.draw(st.integers(start, len(content) - 1))
    damaged = bytearray(content)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(MalformedFile) as info:
        parse_moments(bytes(damaged), what="m")
    assert info.value.reason == "safetensors.checksum"
    assert str(info.value) == "m is damaged: its content has another sha256 than it says."
    assert "compute it again" in str(info.value.hint)


def test_a_changed_description_is_noticed(content: bytes) -> None:
    """A number that no other check can tell from the right one."""
    sha = SequenceRecord.of([1]).sha256
    mark = b'sha256\\":\\"'
    at = content.index(mark) + len(mark)
    damaged = content[:at] + sha.encode() + content[at + 64 :]
    with pytest.raises(MalformedFile) as info:
        parse_moments(damaged)
    assert info.value.reason == "safetensors.checksum"


def test_the_checksum_is_what_the_documentation_says(content: bytes) -> None:
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    said = metadata.pop("oscar-zoo.sha256")
    assert said == sha256_hex(metadata["oscar-zoo.moments"].encode() + content[end:])


def test_a_file_without_a_checksum_is_read(moments: Moments, content: bytes) -> None:
    older = rebuilt(content, lambda description, tensors: None)
    assert b"oscar-zoo.sha256" not in older
    got, info = parse_moments(older)
    assert info == describe(moments)
    assert_same(got, moments)


def test_every_refusal_has_a_next_step(content: bytes) -> None:
    for data in (
        b"PK\x03\x04" + b"\0" * 200,
        content[:-8],
        content.replace(b"oscar-zoo.moments/1", b"oscar-zoo.moments/2"),
        content.replace(b"attention_layers", b"attention_layerz"),
        rebuilt(content, poisoned),
        rebuilt(content, other_layers),
        rebuilt(content, more_tokens),
    ):
        with pytest.raises(MalformedFile) as info:
            parse_moments(data)
        assert info.value.hint


def test_sums_of_more_rows_continue_where_the_file_stopped(tmp_path: Path) -> None:
    """A resumed capture has the very sums of one that was never interrupted."""
    whole, part = Moments.zeros(MODEL.geometry), Moments.zeros(MODEL.geometry)
    for layer in MODEL.attention_layers:
        add(whole.layers[layer], layer_rows(layer).part(slice(0, 70)))
        add(part.layers[layer], layer_rows(layer).part(slice(0, 70)))
    save_moments(tmp_path / "resume", part, describe(part, records(70)))
    resumed, _ = load_moments(tmp_path / "resume")
    for layer in MODEL.attention_layers:
        add(whole.layers[layer], layer_rows(layer).part(slice(70, 200)))
        add(resumed.layers[layer], layer_rows(layer).part(slice(70, 200)))
    assert_same(resumed, whole)
