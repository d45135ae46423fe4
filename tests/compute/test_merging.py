"""Parts of captures become what one process would have summed, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
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

from oscar_zoo.artifact.fit_block import Disjoint
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.compute import coverage
from oscar_zoo.compute.fit import possible_methods
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments, Need
from oscar_zoo.compute.merging import LOST_WEIGHTS, MergeResult, merge_files
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, load_moments, save_moments
from oscar_zoo.errors import ComputeFailed, UsageError

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


def rank(
    folder: Path, name: str, heads: Sequence[int], queries: slice, layers: Sequence[int] = (0, 2)
) -> Path:
    """What a rank that holds these KV heads, query heads and layers writes after both passes."""
    sums = {}
    for layer in layers:
        rows = layer_rows(layer)
        q, o = (torch.from_numpy(x[queries]) for x in (rows.query, rows.output))
        k, v = (torch.from_numpy(x[list(heads)]) for x in (rows.key, rows.value))
        sums[layer] = LayerMoments.zeros(len(heads), 16, 8, heads=heads)
        sums[layer].add(q, k, v, o)
        sums[layer].set_weights(
            torch.from_numpy(rows.weights[:, queries.start * 8 : queries.stop * 8])
        )
        sums[layer].add_weighted(k, v, sums[layer].qq / sums[layer].query_rows)
    moments = Moments(MODEL.geometry, sums)
    return save(folder, name, moments, describe(moments, records(200), partial=True))


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


def test_heads_of_ranks_join(tmp_path: Path) -> None:
    paths = [rank(tmp_path, "b", [1], slice(2, 4)), rank(tmp_path, "a", [0], slice(0, 2))]
    result = merge_files(paths, tmp_path / "out")
    assert_whole(result, tmp_path / "out", weighted=True)
    assert result.info.coverage is not None
    assert result.info.coverage.tp == 2
    assert result.info.calibration == describe(random_moments()).calibration


def test_ranks_that_share_key_value_heads_join(tmp_path: Path) -> None:
    paths = [rank(tmp_path, str(j), [j // 2], slice(j, j + 1)) for j in range(4)]
    assert_whole(merge_files(paths, tmp_path / "out"), tmp_path / "out", weighted=True)
    again, _ = load_moments(paths[1])
    again.layers[0].vv *= 1.01
    save(tmp_path, "1", again, describe(again, records(200), partial=True))
    with pytest.raises(ComputeFailed, match="share KV head 0 saw different"):
        merge_files(paths, tmp_path / "out")


def test_layers_of_pipeline_stages_unite(tmp_path: Path) -> None:
    paths = [rank(tmp_path, str(layer), [0, 1], slice(0, 4), [layer]) for layer in (2, 0)]
    result = merge_files(paths, tmp_path / "out")
    assert_whole(result, tmp_path / "out", weighted=True)
    assert result.info.coverage is not None
    assert result.info.coverage.pp == 2


def test_stages_of_tensor_parallel_ranks_join_and_unite(tmp_path: Path) -> None:
    paths = [
        rank(tmp_path, f"{layer}{head}", [head], slice(2 * head, 2 * head + 2), [layer])
        for layer in (0, 2)
        for head in (0, 1)
    ]
    assert_whole(merge_files(paths, tmp_path / "out"), tmp_path / "out", weighted=True)


def test_a_missing_part_is_said(tmp_path: Path) -> None:
    paths = [rank(tmp_path, str(j), [j // 2], slice(j, j + 1)) for j in (0, 1)]
    result = merge_files(paths, tmp_path / "out")
    assert result.info.partial
    assert result.notes == ("parts are missing: layer 0 has the KV heads [0], the model 2.",)
    more = [tmp_path / "out", *(rank(tmp_path, str(j), [1], slice(j, j + 1)) for j in (2, 3))]
    assert_whole(merge_files(more, tmp_path / "whole"), tmp_path / "whole", weighted=True)


def test_tokens_are_never_counted_twice(tmp_path: Path) -> None:
    first, second = (part_of_tokens(tmp_path, number) for number in (0, 1))
    both = merge_files([first, second], tmp_path / "both")
    assert both.info.sequences
    out = tmp_path / "out"
    for paths, message in (
        ((first, first), "tokens0 and .*tokens0 hold the same sequences"),
        ((tmp_path / "both", second), "have sequences in common"),
        ((second, first, tmp_path / "both"), "have sequences in common"),
    ):
        with pytest.raises(UsageError, match=message):
            merge_files(paths, out)
    stage = rank(tmp_path, "stage", [0, 1], slice(0, 4), [0])
    with pytest.raises(UsageError, match="layer 0 of the same sequences is in"):
        merge_files([stage, rank(tmp_path, "whole", [0, 1], slice(0, 4))], out)
    head = rank(tmp_path, "head", [1], slice(2, 4), [2])
    with pytest.raises(UsageError, match="lack heads in some layers"):
        merge_files([stage, head], out)
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
