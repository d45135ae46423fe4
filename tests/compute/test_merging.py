"""Parts of captures become what one process would have summed, or are refused by name."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
from random_moments import (
    MODEL,
    NUMERICS,
    add,
    describe,
    layer_rows,
    random_moments,
    records,
    weigh,
)

from oscar_zoo.artifact.manifest import Disjoint
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.compute import coverage
from oscar_zoo.compute.fit import possible_methods
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, Need
from oscar_zoo.compute.merging import LOST_WEIGHTS, MergeResult, merge_files
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, load_moments, save_moments
from oscar_zoo.errors import UsageError

ALL: frozenset[Need] = frozenset({"rows", "weighted", "outputs", "weights"})
SPLIT = (slice(0, 60), slice(60, 90), slice(90, 200))
SEQUENCES = tuple(records(part.stop - part.start, seed=part.start) for part in SPLIT)


def save(folder: Path, name: str, moments: Moments, info: MomentsInfo) -> Path:
    save_moments(folder / name, moments, info)
    return folder / name


def part_of_tokens(folder: Path, number: int, *, weighted: bool = False) -> Path:
    moments = Moments.zeros(MODEL.geometry)
    for layer, sums in moments.layers.items():
        rows = layer_rows(layer).part(SPLIT[number])
        add(sums, rows)
        if weighted:
            weigh(sums, rows)
    return save(folder, f"tokens{number}", moments, describe(moments, SEQUENCES[number]))


def assert_whole(result: MergeResult, path: Path, *, weighted: bool) -> None:
    got, info = load_moments(path)
    assert info == result.info
    want = random_moments()
    names = (*ROW_SUMS, *(WEIGHTED_SUMS if weighted else ()), "wo")
    for layer in want.layers:
        for name in names:
            mine, theirs = getattr(got.layers[layer], name), getattr(want.layers[layer], name)
            assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max(), name
    coverage.check(got, ALL if weighted else ALL - {"weighted"})


def test_parts_of_the_data_add_in_any_order(tmp_path: Path) -> None:
    paths = [part_of_tokens(tmp_path, number) for number in range(3)]
    written = set()
    for order in permutations(paths):
        result = merge_files(order, tmp_path / "out")
        assert_whole(result, tmp_path / "out", weighted=False)
        assert result.notes == ()
        written.add(result.file.sha256)
    assert len(written) == 1
    assert not result.info.partial
    assert {*result.info.sequences} == {one for part in SEQUENCES for one in part}
    coverage = result.info.coverage
    assert coverage is not None
    assert (coverage.tokens_min, coverage.tokens_max, coverage.dp, coverage.tp) == (200, 200, 3, 1)


def test_merging_in_two_steps_is_merging_at_once(tmp_path: Path) -> None:
    paths = [part_of_tokens(tmp_path, number) for number in range(3)]
    merge_files(paths[:2], tmp_path / "two")
    result = merge_files([tmp_path / "two", paths[2]], tmp_path / "out")
    assert_whole(result, tmp_path / "out", weighted=False)


def test_weights_that_knew_only_a_part_of_the_data_are_left_out(tmp_path: Path) -> None:
    paths = [part_of_tokens(tmp_path, number, weighted=True) for number in range(3)]
    result = merge_files(paths, tmp_path / "out")
    assert result.notes == (LOST_WEIGHTS,)
    assert_whole(result, tmp_path / "out", weighted=False)
    unweighted = tuple(name for name in METHODS if "weighted" not in METHODS[name].needs)
    assert possible_methods(load_moments(tmp_path / "out")[0]) == unweighted
    assert "oscar-exact" in unweighted and "oscar" not in unweighted


def test_tokens_are_never_counted_twice(tmp_path: Path) -> None:
    first, second = (part_of_tokens(tmp_path, number) for number in (0, 1))
    both = merge_files([first, second], tmp_path / "both")
    assert both.info.sequences
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
    wider = Moments.zeros(MODEL.geometry.model_copy(update={"num_q_heads": 8}))
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
    merged = merge_files([first, other], tmp_path / "out").info
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
