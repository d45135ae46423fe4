"""Which numbers of GPUs can share the heads of a model, as SGLang's attention layers decide it."""

from __future__ import annotations

import pytest

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.head_split import check_heads, splits
from oscar_zoo.errors import UsageError


def heads(query: int, kv: int) -> Geometry:
    return Geometry(
        num_layers=1,
        num_q_heads=query,
        num_kv_heads=kv,
        head_dim=64,
        v_head_dim=64,
        attention_layers=(0,),
    )


@pytest.mark.parametrize(
    ("geometry", "numbers"),
    [
        (heads(40, 8), [1, 2, 4, 8, 40]),  # Qwen3-14B
        (heads(24, 8), [1, 2, 4, 8, 24]),  # Llama-3.2-3B
        (heads(64, 4), [1, 2, 4, 8, 16, 32, 64]),  # Qwen3-235B-A22B
        (heads(16, 2), [1, 2, 4, 8, 16]),  # Qwen3.5-35B-A3B
        (heads(28, 4), [1, 2, 4, 28]),  # Qwen2.5-7B
        (heads(6, 1), [1, 2, 3, 6]),
    ],
)
def test_every_rank_has_as_many_heads_or_a_copy_of_one(
    geometry: Geometry, numbers: list[int]
) -> None:
    assert [number for number in range(1, 70) if splits(geometry, number)] == numbers


def test_the_workers_of_dp_attention_each_split_all_heads() -> None:
    check_heads("M", heads(40, 8), Layout(tp=10, workers=5), option="--tp {}")
    with pytest.raises(UsageError, match="5 GPUs of a worker cannot share the 40 query") as error:
        check_heads("M", heads(40, 8), Layout(tp=10, workers=2), option="--tp {}")
    assert str(error.value.hint).endswith("--tp 8")


def test_replicas_and_groups_do_not_split_heads() -> None:
    check_heads("M", heads(40, 8), Layout(tp=8, pp=5, replicas=3), option="--tp {}")
