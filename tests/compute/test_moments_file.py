"""The moments file: nothing is lost, the same moments give the same bytes, and no file of others is
believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_moments import (
    MODEL,
    NUMERICS,
    add,
    describe,
    empty_moments,
    layer_rows,
    random_moments,
    records,
    weigh,
)
from safetensors.torch import load_file

from oscar_zoo.artifact import strict_json, tensor_file
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import Disjoint
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.compute.methods.base import possible_methods
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments, Moments, Need
from oscar_zoo.compute.moments_file import (
    KEY,
    LOST_WEIGHTS,
    MAX_HEADER,
    MomentsInfo,
    SequenceRecord,
    load_moments,
    merge_files,
    moments_bytes,
    parse_moments,
    save_moments,
)
from oscar_zoo.errors import (
    ComputeFailed,
    MalformedFile,
    OscarZooError,
    PathNotFound,
    StorageError,
    UsageError,
)

COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens")


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


def test_a_part_of_a_capture_resumes(tmp_path: Path) -> None:
    """Layers at different stages, one sequence of two."""
    part = empty_moments()
    add(part.layers[0], layer_rows(0))
    info = describe(part, records(200), partial=True)
    save_moments(tmp_path / "part", part, info)
    got, found = load_moments(tmp_path / "part")
    assert found == info
    assert found.coverage is None
    assert_same(got, part)
    assert got.layers[2].tokens == 0


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

    for moments, wrong, message in (
        (fewer, info, "layer 2 saw 201 tokens, another layer 200"),
        (whole, info.model_copy(update={"sequences": records(150)}), "200 tokens are described"),
        (whole, info.model_copy(update={"coverage": None}), "200 tokens are described"),
        (unlike, info, "another model"),
        (replace(whole, layers={}), info, "another model"),
        (broken(spoil), info.model_copy(update={"partial": True}), "layer 2: kk has NaN"),
        (broken(blind), info, "layer 2 has no output projection"),
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


Change = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Changes the description and the tensors of a file."""


def poisoned(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["v_sum"][0, 0, 0] = np.inf


def unweighted(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][1]["weighted_tokens"] = 0
    for name in ("sst_num", "sst_den"):
        tensors[name] = tensors[name][:1]


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "a sum is missing": (lambda d, t: t.pop("kk"), "moments.shape"),
    "one too many": (lambda d, t: t.update(M_q=t["kk"]), "moments.name"),
    "a square": (lambda d, t: t.update(vv=np.zeros((2, 2, 8, 8))), "moments.shape"),
    "a head is missing": (lambda d, t: t.update(qq=t["qq"][:, :1]), "moments.shape"),
    "infinity": (poisoned, "moments.values"),
    "a huge model": (lambda d, t: d["info"]["model"].update(v_head_dim=1 << 30), "moments.shape"),
    "other layers": (lambda d, t: d["layers"][0].update(id=1), "moments.layers"),
    "a layer twice": (lambda d, t: d["layers"][1].update(id=0), "moments.layers"),
    "no layers": (lambda d, t: d.update(layers=[]), "moments.layers"),
    "other heads": (lambda d, t: d.update(heads=[0, 2]), "moments.heads"),
    "more tokens": (lambda d, t: d["layers"][1].update(tokens=400), "moments.coverage"),
    "unweighted": (unweighted, "moments.coverage"),
    "negative": (lambda d, t: d["layers"][1].update(tokens=-1), "moments.schema"),
    "an unknown key": (lambda d, t: d["info"].update(note="hello"), "moments.schema"),
    "no hash": (lambda d, t: d["info"]["sequences"][0].update(sha256="ab"), "moments.schema"),
    "another version": (lambda d, t: d.update(schema="oscar-zoo.moments/2"), "moments.version"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_files_that_contradict_themselves_are_refused(content: bytes, name: str) -> None:
    edit, reason = CONTRADICTIONS[name]
    with pytest.raises(MalformedFile) as info:
        parse_moments(rebuilt(content, edit))
    assert info.value.reason == reason
    assert info.value.hint


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
        moments.check({"rows", "weighted", "outputs", "weights"})


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


def test_sums_of_more_rows_continue_where_the_file_stopped(tmp_path: Path) -> None:
    """A resumed capture has the very sums of one that was never interrupted."""
    whole, part = empty_moments(MODEL.geometry), empty_moments(MODEL.geometry)
    for layer in MODEL.attention_layers:
        add(whole.layers[layer], layer_rows(layer).part(slice(0, 70)))
        add(part.layers[layer], layer_rows(layer).part(slice(0, 70)))
    save_moments(tmp_path / "resume", part, describe(part, records(70)))
    resumed, _ = load_moments(tmp_path / "resume")
    for layer in MODEL.attention_layers:
        add(whole.layers[layer], layer_rows(layer).part(slice(70, 200)))
        add(resumed.layers[layer], layer_rows(layer).part(slice(70, 200)))
    assert_same(resumed, whole)


ALL: frozenset[Need] = frozenset({"rows", "weighted", "outputs", "weights"})
SPLIT = (slice(0, 60), slice(60, 90), slice(90, 200))
SEQUENCES = tuple(records(part.stop - part.start, seed=part.start) for part in SPLIT)


def save(folder: Path, name: str, moments: Moments, info: MomentsInfo) -> Path:
    save_moments(folder / name, moments, info)
    return folder / name


def part_of_tokens(folder: Path, number: int, *, weighted: bool = False) -> Path:
    moments = empty_moments(MODEL.geometry)
    for layer, sums in moments.layers.items():
        rows = layer_rows(layer).part(SPLIT[number])
        add(sums, rows)
        if weighted:
            weigh(sums, rows)
    return save(folder, f"tokens{number}", moments, describe(moments, SEQUENCES[number]))


def assert_whole(said: MomentsInfo, path: Path, *, weighted: bool) -> None:
    got, info = load_moments(path)
    assert info == said
    want = random_moments()
    names = (*ROW_SUMS, *(WEIGHTED_SUMS if weighted else ()), "wo")
    for layer in want.layers:
        for name in names:
            mine, theirs = getattr(got.layers[layer], name), getattr(want.layers[layer], name)
            assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max(), name
    got.check(ALL if weighted else ALL - {"weighted"})


def test_parts_of_the_data_add_in_any_order(tmp_path: Path) -> None:
    paths = [part_of_tokens(tmp_path, number) for number in range(3)]
    written = set()
    for order in permutations(paths):
        file, info, notes = merge_files(order, tmp_path / "out")
        assert_whole(info, tmp_path / "out", weighted=False)
        assert notes == ()
        written.add(file.sha256)
    assert len(written) == 1
    assert not info.partial
    assert {*info.sequences} == {one for part in SEQUENCES for one in part}
    seen = info.coverage
    assert seen is not None
    assert (seen.tokens_min, seen.tokens_max, seen.dp, seen.tp) == (200, 200, 3, 1)


def test_weights_that_knew_only_a_part_of_the_data_are_left_out(tmp_path: Path) -> None:
    paths = [part_of_tokens(tmp_path, number, weighted=True) for number in range(3)]
    _, info, notes = merge_files(paths, tmp_path / "out")
    assert notes == (LOST_WEIGHTS,)
    assert_whole(info, tmp_path / "out", weighted=False)
    unweighted = tuple(name for name in METHODS if "weighted" not in METHODS[name].needs)
    assert possible_methods(load_moments(tmp_path / "out")[0]) == unweighted
    assert "oscar-exact" in unweighted and "oscar" not in unweighted


def test_tokens_are_never_counted_twice(tmp_path: Path) -> None:
    first, second = (part_of_tokens(tmp_path, number) for number in (0, 1))
    both = merge_files([first, second], tmp_path / "both")
    assert both[1].sequences
    out = tmp_path / "out"
    for paths, message in (
        ((first, first), "tokens0 and .*tokens0 have sequences in common"),
        ((tmp_path / "both", second), "have sequences in common"),
        ((second, first, tmp_path / "both"), "have sequences in common"),
    ):
        with pytest.raises(UsageError, match=message):
            merge_files(paths, out)
    assert not out.exists()
    with pytest.raises(UsageError, match="nothing to merge"):
        merge_files([first], out)


def test_parts_of_other_models_or_numerics_are_refused(tmp_path: Path) -> None:
    first = part_of_tokens(tmp_path, 0)
    moments, info = load_moments(part_of_tokens(tmp_path, 1))

    def refused(message: str, **changes: object) -> None:
        other = save(tmp_path, "other", moments, info.model_copy(update=changes))
        with pytest.raises(UsageError, match=message):
            merge_files([first, other], tmp_path / "out")

    refused(
        "different models: id is oscar-zoo/random here and x/y there",
        model=MODEL.model_copy(update={"id": "x/y"}),
    )
    refused("revision is None here", model=MODEL.model_copy(update={"revision": "a" * 40}))
    refused(
        "forward_dtype is float32 here",
        numerics=NUMERICS.model_copy(update={"forward_dtype": "bfloat16"}),
    )
    engine = Harness(name="rows", version="2")
    refused(
        "engine is rows 1 here and rows 2 there",
        numerics=NUMERICS.model_copy(update={"engine": engine}),
    )
    refused("accumulate", numerics=NUMERICS.model_copy(update={"accumulate": "float32-chunked"}))
    refused("does not say which sequences", partial=True, coverage=None, sequences=())
    wider = empty_moments(MODEL.geometry.model_copy(update={"num_q_heads": 8}))
    for layer, sums in wider.layers.items():
        rows = [
            torch.from_numpy(x)
            for x in (layer_rows(layer).query, layer_rows(layer).key, layer_rows(layer).value)
        ]
        sums.add(torch.cat([rows[0], rows[0]]), rows[1], rows[2])
    whole = describe(wider, records(200, seed=7)).model_copy(
        update={"model": MODEL.model_copy(update={"num_q_heads": 8})}
    )
    with pytest.raises(UsageError, match="num_q_heads is 4 here and 8 there"):
        merge_files([first, save(tmp_path, "wider", wider, whole)], tmp_path / "out")


def test_calibration_blocks_become_one(tmp_path: Path) -> None:
    first = part_of_tokens(tmp_path, 0)
    moments, info = load_moments(part_of_tokens(tmp_path, 1))
    assert info.calibration is not None
    proven = Disjoint(dataset="aime", method="13-gram")
    changes = {
        "dataset": "chat",
        "content": "generated",
        "seed": 4,
        "disjoint_from": (proven,),
        "overlaps_with": ("a",),
    }
    calibration = info.calibration.model_copy(update=changes)
    numerics = NUMERICS.model_copy(update={"device": "y"})
    other = save(
        tmp_path,
        "other",
        moments,
        info.model_copy(update={"calibration": calibration, "numerics": numerics}),
    )
    merged = merge_files([first, other], tmp_path / "out")[1]
    block = merged.calibration
    assert block is not None
    assert {*str(block.dataset).split(" + ")} == {"random", "chat"}
    assert (block.prompts_sha256, block.seed, block.content, block.chat_template) == (
        None,
        None,
        "mixed",
        False,
    )
    assert (block.sequences, block.tokens_requested, block.tokens_used) == (2, 90, 90)
    assert block.length is not None
    assert (block.length.min, block.length.median, block.length.max) == (30, 30, 60)
    assert (block.disjoint_from, block.overlaps_with) == (None, ("a",))
    assert {*merged.numerics.device.split(" + ")} == {"x", "y"}
