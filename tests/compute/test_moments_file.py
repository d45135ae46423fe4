"""The moments file: nothing is lost, the same moments give the same bytes, and no file of others is
believed."""

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
    COUNTS,
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

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json, tensor_file
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import Disjoint
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.compute.methods.table import METHODS, possible_methods
from oscar_zoo.compute.moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments, Moments
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


@pytest.fixture(scope="module")
def moments() -> Moments:
    return random_moments()


@pytest.fixture(scope="module")
def content(moments: Moments) -> bytes:
    return moments_bytes(moments, describe(moments))


def assert_same(got: Moments, want: Moments) -> None:
    """Equal to the bit, upper triangles apart."""
    assert got.geometry == want.geometry and sorted(got.layers) == sorted(want.layers)
    for layer, mine in got.layers.items():
        theirs = want.layers[layer]
        assert all(getattr(mine, name) == getattr(theirs, name) for name in COUNTS)
        for name in (*ROW_SUMS, *WEIGHTED_SUMS, "wo"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one is None) == (other is None), name
            if one is not None and one.dim() == 3:
                one, other = one.tril(), other.tril()
            assert one is None or torch.equal(one, other), name


def test_what_is_loaded_is_what_was_saved(moments: Moments, tmp_path: Path) -> None:
    info, path = describe(moments), tmp_path / "moments.safetensors"
    said = save_moments(path, moments, info)
    data = path.read_bytes()
    assert (said.sha256, said.size, said.location) == (sha256_hex(data), len(data), path.name)
    got, found = load_moments(path)
    assert found == info
    assert_same(got, moments)
    add(got.layers[0], layer_rows(0))  # in memory of its own
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_the_same_moments_give_the_same_bytes(moments: Moments, content: bytes) -> None:
    assert moments_bytes(random_moments(), describe(moments)) == content
    layers = dict(reversed(moments.layers.items()))
    assert moments_bytes(replace(moments, layers=layers), describe(moments)) == content


def test_others_read_lower_triangles(moments: Moments, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    tensors = load_file(tmp_path / "m.safetensors")
    assert tensors["qq"].shape == (2, 2, 16 * 17 // 2)
    rows, columns = np.tril_indices(16)
    assert torch.equal(tensors["qq"][1, 0], moments.layers[2].qq[0, rows, columns])
    values = sum(tensor.numel() for tensor in tensors.values())
    assert values == 2 * 2 * (2 * 136 + 16 + 4 * 36 + 8 + 1)
    assert len(content) - 8 * values < 4096


def test_a_part_of_a_capture_goes_on_with_the_sums_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Layers at different stages, one sequence of two."""
    first, rest = slice(0, 70), slice(70, 200)
    whole, part = empty_moments(), empty_moments()
    add(part.layers[0], layer_rows(0).part(first))
    info = describe(part, records(70), partial=True)
    save_moments(tmp_path / "part", part, info)
    got, found = load_moments(tmp_path / "part")
    assert found == info and found.coverage is None and got.layers[2].tokens == 0
    assert_same(got, part)
    for layer in MODEL.attention_layers:
        for some in (first, rest):
            add(whole.layers[layer], layer_rows(layer).part(some))
    add(got.layers[0], layer_rows(0).part(rest))
    for some in (first, rest):
        add(got.layers[2], layer_rows(2).part(some))
    assert_same(got, whole)


def broken(change: Callable[[LayerMoments], object]) -> Moments:
    moments = random_moments()
    change(moments.layers[2])
    return moments


def test_moments_that_are_not_what_they_are_described_as_are_not_saved(tmp_path: Path) -> None:
    whole = random_moments()
    info, path = describe(whole), tmp_path / "moments.safetensors"
    path.write_bytes(b"old")
    one_more = [torch.ones(n, 1, d) for n, d in ((4, 16), (2, 16), (2, 8))]
    unlike = Moments(MODEL.geometry.model_copy(update={"num_layers": 4}), whole.layers)
    spoiled = broken(lambda layer: layer.kk[0, 0].fill_(torch.nan))
    blind = broken(lambda layer: setattr(layer, "wo", None))
    for moments, changes, message in (
        (broken(lambda layer: layer.add(*one_more)), {}, "layer 2 saw 201 tokens"),
        (whole, {"sequences": records(150)}, "200 tokens are described"),
        (whole, {"coverage": None}, "200 tokens are described"),
        (unlike, {}, "another model"),
        (replace(whole, layers={}), {}, "another model"),
        (spoiled, {"partial": True}, "layer 2: kk has NaN"),
        (blind, {}, "layer 2 has no output projection"),
    ):
        with pytest.raises(errors.ComputeFailed, match=message):
            save_moments(path, moments, info.model_copy(update=changes))
    assert path.read_bytes() == b"old"
    with pytest.raises(errors.StorageError, match="cannot write"):
        save_moments(tmp_path / "missing" / "m", whole, info)


Change = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Changes the description and the tensors of a file, in place."""


def rebuilt(content: bytes, edit: Change) -> bytes:
    arrays, metadata = tensor_file.read_with_metadata(content, what="m", max_header=MAX_HEADER)
    description = json.loads(metadata[KEY])
    tensors: dict[str, Any] = {name: array.copy() for name, array in arrays.items()}
    edit(description, tensors)
    return tensor_file.write(tensors, {KEY: strict_json.canonical_bytes(description).decode()})


def unweighted(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["layers"][1]["weighted_tokens"] = 0
    for name in ("sst_num", "sst_den"):
        tensors[name] = tensors[name][:1]


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "a sum is missing": (lambda d, t: t.pop("kk"), "moments.shape"),
    "one too many": (lambda d, t: t.update(M_q=t["kk"]), "moments.name"),
    "a square": (lambda d, t: t.update(vv=np.zeros((2, 2, 8, 8))), "moments.shape"),
    "a head is missing": (lambda d, t: t.update(qq=t["qq"][:, :1]), "moments.shape"),
    "infinity": (lambda d, t: t["v_sum"].fill(np.inf), "moments.values"),
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
    with pytest.raises(errors.MalformedFile) as info:
        parse_moments(rebuilt(content, edit))
    assert info.value.reason == reason and info.value.hint


def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {KEY: 3}}).encode()
    for data, reason in (
        (b"", "file.empty"),
        (b"<!DOCTYPE html><html>", "file.html"),
        (b"PK\x03\x04" + b"\0" * 200, "safetensors.header"),
        (tensor_file.write({"qq.trace": np.ones(3, dtype=np.float32)}), "safetensors.dtype"),
        (tensor_file.write({"qq": np.ones((1, 1))}, {"format": "pt"}), "moments.schema"),
        (len(header).to_bytes(8, "little") + header, "safetensors.metadata"),
        (content + b"\0" * 8, "safetensors.gap"),
    ):
        with pytest.raises(errors.MalformedFile) as info:
            parse_moments(data)
        assert info.value.reason == reason
    with pytest.raises(errors.PathNotFound):
        load_moments(tmp_path / "missing")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(errors.MalformedFile, match="symbolic link"):
        load_moments(tmp_path / "link")


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_damaged_bytes_are_an_error_or_whole_moments(content: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, 3000))
    damaged = bytearray(content)
    if data.draw(st.booleans()):
        damaged = damaged[:position]
    else:
        damaged[position] = data.draw(st.integers(0, 255))
    try:
        moments, info = parse_moments(bytes(damaged))
    except errors.OscarZooError:
        return
    if not info.partial:
        moments.check({"rows", "weighted", "outputs", "weights"})


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_one_changed_bit_of_the_content_is_noticed(content: bytes, data: st.DataObject) -> None:
    start = 8 + int.from_bytes(content[:8], "little")
    damaged = bytearray(content)
    damaged[data.draw(st.integers(start, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(errors.MalformedFile) as info:
        parse_moments(bytes(damaged), what="m")
    assert info.value.reason == "safetensors.checksum"
    assert "compute it again" in str(info.value.hint)


def test_a_changed_description_is_noticed(content: bytes) -> None:
    """A number that no other check can tell from the right one."""
    sha = SequenceRecord.of([1]).sha256
    mark = b'sha256\\":\\"'
    at = content.index(mark) + len(mark)
    with pytest.raises(errors.MalformedFile) as info:
        parse_moments(content[:at] + sha.encode() + content[at + 64 :])
    assert info.value.reason == "safetensors.checksum"


def test_the_checksum_is_what_the_documentation_says(moments: Moments, content: bytes) -> None:
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    said = metadata.pop("oscar-zoo.sha256")
    assert said == sha256_hex(metadata["oscar-zoo.moments"].encode() + content[end:])
    older = rebuilt(content, lambda description, tensors: None)
    assert b"oscar-zoo.sha256" not in older
    got, info = parse_moments(older)  # files of earlier releases have none
    assert info == describe(moments)
    assert_same(got, moments)


SPLIT = (slice(0, 60), slice(60, 90), slice(90, 200))
SEQUENCES = tuple(records(part.stop - part.start, seed=part.start) for part in SPLIT)


def save(path: Path, moments: Moments, info: MomentsInfo) -> Path:
    save_moments(path, moments, info)
    return path


def part_of_tokens(folder: Path, number: int, *, weighted: bool = False) -> Path:
    moments = empty_moments(MODEL.geometry)
    for layer, sums in moments.layers.items():
        rows = layer_rows(layer).part(SPLIT[number])
        add(sums, rows)
        if weighted:
            weigh(sums, rows)
    return save(folder / f"tokens{number}", moments, describe(moments, SEQUENCES[number]))


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_of_the_data_add_in_any_order(tmp_path: Path, weighted: bool) -> None:
    """Weights that knew only a part of the data are left out."""
    paths = [part_of_tokens(tmp_path, number, weighted=weighted) for number in range(3)]
    written = set()
    for order in permutations(paths):
        file, info, notes = merge_files(order, tmp_path / "out")
        written.add(file.sha256)
        assert notes == ((LOST_WEIGHTS,) if weighted else ())
    assert len(written) == 1 and not info.partial
    assert {*info.sequences} == {one for part in SEQUENCES for one in part}
    seen = info.coverage
    assert seen is not None
    assert (seen.tokens_min, seen.tokens_max, seen.dp, seen.tp) == (200, 200, 3, 1)
    got, found = load_moments(tmp_path / "out")
    assert found == info
    for layer, want in random_moments().layers.items():
        for name in (*ROW_SUMS, "wo"):
            mine, theirs = getattr(got.layers[layer], name), getattr(want, name)
            assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max(), name
    got.check({"rows", "outputs", "weights"})
    unweighted = tuple(name for name in METHODS if "weighted" not in METHODS[name].needs)
    assert possible_methods(got) == unweighted
    assert "oscar-exact" in unweighted and "oscar" not in unweighted


def test_tokens_are_never_counted_twice(tmp_path: Path) -> None:
    first, second = (part_of_tokens(tmp_path, number) for number in (0, 1))
    both, out = tmp_path / "both", tmp_path / "out"
    merge_files([first, second], both)
    for paths in ((first, first), (both, second), (second, first, both)):
        with pytest.raises(errors.UsageError, match="have sequences in common"):
            merge_files(paths, out)
    with pytest.raises(errors.UsageError, match="nothing to merge"):
        merge_files([first], out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("block", "changes", "message"),
    [
        ("model", {"id": "x/y"}, "models: id is oscar-zoo/random here and x/y there"),
        ("model", {"revision": "a" * 40}, "revision is None here"),
        ("numerics", {"forward_dtype": "bfloat16"}, "forward_dtype is float32 here"),
        ("numerics", {"accumulate": "float32-chunked"}, "accumulate"),
        (
            "numerics",
            {"engine": Harness(name="rows", version="2")},
            "engine is rows 1 here and rows 2 there",
        ),
        (
            None,
            {"partial": True, "coverage": None, "sequences": ()},
            "does not say which sequences",
        ),
    ],
)
def test_parts_of_other_models_or_numerics_are_refused(
    tmp_path: Path, block: str | None, changes: dict[str, Any], message: str
) -> None:
    moments, info = load_moments(part_of_tokens(tmp_path, 1))
    if block is not None:
        changes = {block: getattr(info, block).model_copy(update=changes)}
    other = save(tmp_path / "other", moments, info.model_copy(update=changes))
    with pytest.raises(errors.UsageError, match=message):
        merge_files([part_of_tokens(tmp_path, 0), other], tmp_path / "out")


def test_parts_of_other_heads_are_refused(tmp_path: Path) -> None:
    model = MODEL.model_copy(update={"num_q_heads": 8})
    wider = empty_moments(model.geometry)
    for layer, sums in wider.layers.items():
        one = layer_rows(layer)
        query, key, value = (torch.from_numpy(x) for x in (one.query, one.key, one.value))
        sums.add(torch.cat([query, query]), key, value)
    info = describe(wider, records(200, seed=7)).model_copy(update={"model": model})
    other = save(tmp_path / "wider", wider, info)
    with pytest.raises(errors.UsageError, match="num_q_heads is 4 here and 8 there"):
        merge_files([part_of_tokens(tmp_path, 0), other], tmp_path / "out")


def test_calibration_blocks_become_one(tmp_path: Path) -> None:
    moments, info = load_moments(part_of_tokens(tmp_path, 1))
    assert info.calibration is not None
    changes = {
        "dataset": "chat",
        "content": "generated",
        "seed": 4,
        "disjoint_from": (Disjoint(dataset="aime", method="13-gram"),),
        "overlaps_with": ("a",),
    }
    blocks = {
        "calibration": info.calibration.model_copy(update=changes),
        "numerics": NUMERICS.model_copy(update={"device": "y"}),
    }
    other = save(tmp_path / "other", moments, info.model_copy(update=blocks))
    merged = merge_files([part_of_tokens(tmp_path, 0), other], tmp_path / "out")[1]
    block = merged.calibration
    assert block is not None
    assert {*str(block.dataset).split(" + ")} == {"random", "chat"}
    assert block.model_dump(exclude={"dataset"}, exclude_none=True) == {
        "sequences": 2,
        "tokens_requested": 90,
        "tokens_used": 90,
        "length": {"min": 30, "median": 30, "max": 60},
        "content": "mixed",
        "chat_template": False,
        "overlaps_with": ("a",),
    }
    assert {*merged.numerics.device.split(" + ")} == {"x", "y"}
