"""Sums of ranks are joined only when every rank saw every token of every sequence once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute import coverage, estimators
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.errors import ComputeFailed, MissingDependency, UnsupportedModel

LENGTHS = (9, 4)
FACTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cpu",
    "accumulate": "float64",
    "weights": "0",
}
WHOLE = Geometry(
    num_layers=3, num_q_heads=8, num_kv_heads=2, head_dim=6, v_head_dim=4, attention_layers=(0, 2)
)


def rows(layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(layer)
    shapes = ((8, 13, 6), (2, 13, 6), (2, 13, 4), (8, 13, 4))
    query, key, value, output = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, output


def part(layer: int, q_heads: Sequence[int], kv_heads: Sequence[int]) -> LayerMoments:
    """What a rank with these heads sums in both passes."""
    query, key, value, output = rows(layer)
    sums = LayerMoments.zeros(len(kv_heads), 6, 4, heads=kv_heads)
    q, kv = list(q_heads), list(kv_heads)
    sums.add(query[q], key[kv], value[kv], output[q])
    sums.add_weighted(key[kv], value[kv], estimators.qqt(sums))
    weights = torch.randn(10, 8, 4, generator=torch.Generator().manual_seed(9))
    sums.set_weights(weights[:, q].flatten(1))
    return sums


def report(sums: LayerMoments, lengths: Sequence[int] = LENGTHS) -> ranks.LayerReport:
    return ranks.LayerReport(
        heads=sums.heads,
        tokens=sums.tokens,
        query_rows=sums.query_rows,
        output_rows=sums.output_rows,
        weighted_tokens=sums.weighted_tokens,
        lengths=tuple(lengths),
        weighted_lengths=LENGTHS,
    )


def write(
    folder: Path, name: str, layers: dict[int, LayerMoments], geometry: Geometry = WHOLE
) -> None:
    own = geometry.model_copy(update={"attention_layers": tuple(layers)})
    reports = {layer: report(sums) for layer, sums in layers.items()}
    ranks.write_rank(folder, name, ranks.RankReport(**FACTS, geometry=own, layers=reports), layers)


def assert_whole(folder: Path, count: int) -> None:
    moments, reports = ranks.join_ranks(folder, count, LENGTHS, weighted=True)
    assert moments.geometry == WHOLE and len(reports) == count
    coverage.check(moments, frozenset({"rows", "weighted", "outputs", "weights"}))
    for layer, sums in moments.layers.items():
        want = part(layer, range(8), range(2))
        for name in (*ROW_SUMS, *WEIGHTED_SUMS, "wo"):
            torch.testing.assert_close(
                getattr(sums, name), getattr(want, name), rtol=1e-12, atol=1e-12
            )


def test_one_rank(tmp_path: Path) -> None:
    write(tmp_path, "pp0-tp0", {layer: part(layer, range(8), range(2)) for layer in (0, 2)})
    assert_whole(tmp_path, 1)


def test_ranks_with_heads_of_their_own(tmp_path: Path) -> None:
    for rank in (1, 0):
        layers = {layer: part(layer, range(4 * rank, 4 * rank + 4), [rank]) for layer in (0, 2)}
        write(tmp_path, f"pp0-tp{rank}", layers)
    assert_whole(tmp_path, 2)


def test_ranks_that_share_heads_and_pipeline_stages(tmp_path: Path) -> None:
    for stage, layer in enumerate((0, 2)):
        for rank in range(4):
            write(
                tmp_path,
                f"pp{stage}-tp{rank}",
                {layer: part(layer, range(2 * rank, 2 * rank + 2), [rank // 2])},
            )
    assert_whole(tmp_path, 8)


def test_a_rank_that_is_missing_is_missed(tmp_path: Path) -> None:
    write(tmp_path, "pp0-tp0", {0: part(0, range(4), [0])})
    with pytest.raises(ComputeFailed, match="1 of 2 ranks handed in sums"):
        ranks.join_ranks(tmp_path, 2, LENGTHS, weighted=True)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ((9, 5), "layer 0 on rank pp0-tp0 saw 4 of the 5 tokens of sequence 1"),
        ((8, 4), "layer 0 on rank pp0-tp0 saw 9 of the 8 tokens of sequence 0"),
        ((4, 9), "saw 9 of the 4 tokens of sequence 0"),
        ((9,), "layer 0 on rank pp0-tp0 saw 2 of 1 sequences"),
        ((9, 4, 1), "saw 2 of 3 sequences"),
    ],
)
def test_other_tokens_than_were_sent_are_noticed(
    tmp_path: Path, sent: tuple[int, ...], text: str
) -> None:
    write(tmp_path, "pp0-tp0", {0: part(0, range(8), range(2))})
    with pytest.raises(ComputeFailed, match=text):
        ranks.join_ranks(tmp_path, 1, sent, weighted=True)


def test_a_second_pass_that_nobody_sent_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, "pp0-tp0", {0: part(0, range(8), range(2))})
    with pytest.raises(
        ComputeFailed, match="second pass of layer 0 on rank pp0-tp0 saw 2 of 0 sequences"
    ):
        ranks.join_ranks(tmp_path, 1, LENGTHS, weighted=False)


def test_ranks_of_different_models_do_not_join(tmp_path: Path) -> None:
    write(tmp_path, "pp0-tp0", {0: part(0, range(4), [0])})
    write(
        tmp_path,
        "pp0-tp1",
        {0: part(0, range(4, 8), [1])},
        WHOLE.model_copy(update={"num_q_heads": 16}),
    )
    with pytest.raises(
        ComputeFailed,
        match="pp0-tp0 and pp0-tp1 run different models: num_q_heads is 8 here and 16",
    ):
        ranks.join_ranks(tmp_path, 2, LENGTHS, weighted=True)


@pytest.mark.parametrize("damage", ["layer-0000.safetensors", "rank.json"])
def test_what_a_rank_left_half_written_is_not_read(tmp_path: Path, damage: str) -> None:
    write(tmp_path, "pp0-tp0", {0: part(0, range(8), range(2))})
    place = tmp_path / "pp0-tp0" / damage
    place.write_bytes(place.read_bytes()[:40])
    with pytest.raises(ComputeFailed, match="the capture is incomplete"):
        ranks.join_ranks(tmp_path, 1, LENGTHS, weighted=True)


@pytest.mark.parametrize("kind", [UnsupportedModel, ComputeFailed])
def test_the_failure_of_any_rank_is_raised(
    tmp_path: Path, kind: type[UnsupportedModel | ComputeFailed]
) -> None:
    ranks.raise_failure(tmp_path)
    ranks.write_failure(tmp_path, "pp0-tp1", kind("layer 3 is odd.", hint="another"))
    with pytest.raises(kind) as caught:
        ranks.join_ranks(tmp_path, 2, LENGTHS, weighted=True)
    assert (caught.value.message, caught.value.hint) == ("layer 3 is odd.", "another")


def test_other_failures_keep_their_words(tmp_path: Path) -> None:
    ranks.write_failure(tmp_path, "pp0-tp0", MissingDependency.for_extra("sglang", "serve"))
    with pytest.raises(ComputeFailed, match="this needs sglang"):
        ranks.raise_failure(tmp_path)
