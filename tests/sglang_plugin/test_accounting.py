"""The memory plan: the numbers of the design, the error when nothing is left, and the line for the log."""

from __future__ import annotations

import pytest
import torch
from tiny_artifacts import rotation

from oscar_kernels.spec import QuantSpec
from oscar_zoo.errors import UsageError
from oscar_zoo.sglang_plugin.accounting import MemoryPlan, describe, plan
from oscar_zoo.sglang_plugin.side_store import SideShape
from oscar_zoo.sglang_plugin.slot_store import SlotShape
from oscar_zoo.sglang_plugin.transforms import TransformTable, transform_bytes

SPEC = QuantSpec(128, 128, 0.96)
QWEN3_8B = SlotShape(36, 0, 8, SPEC, SPEC)


def side(rows: int, idle: int = 0) -> SideShape:
    return SideShape(36, rows, 8, 128, 128, 64, 256, torch.bfloat16, idle)


def test_one_request_of_qwen3_8b() -> None:
    assert side(1).token_bytes == 147_456
    assert side(1).nbytes == 320 * 147_456 + 12


def test_the_budget_is_what_is_left() -> None:
    whole = plan(QWEN3_8B, side(65, idle=64), transforms=4_718_592)
    assert whole.slot == 20_736
    assert whole.side == (65 * 256 + 129 * 64) * 147_456 + 65 * 12
    assert whole.budget(10**10) == 10**10 - whole.side - 4_718_592


def test_no_budget_names_the_flag_to_lower() -> None:
    short = MemoryPlan(slot=100, side=900, transforms=100)
    assert short.budget(1001) == 1
    with pytest.raises(UsageError, match="only 0 MB are there") as caught:
        short.budget(1000)
    assert "--max-running-requests" in str(caught.value.hint)


def test_the_line_for_the_log() -> None:
    line = describe(plan(QWEN3_8B, side(65, 64), 4_718_592), QWEN3_8B, side(65, 64), tokens=100_000)
    for part in (
        "100000 token slots of 20736 bytes (2.25 bits per element)",
        "65 request rows (256 recent tokens each)",
        "129 sink blocks (64 first tokens each, 64 for finished requests)",
    ):
        assert part in line


@pytest.mark.parametrize("heads", [1, 2])
def test_transforms_take_the_bytes_that_were_planned(heads: int) -> None:
    from cache_oracle import general_set

    for k, v in (
        (rotation("qqt_r_h_pbr"), rotation("sst_r_h_pbr")),
        (general_set("k", 4, 2, 64, seed=1), general_set("v", 4, 2, 64, seed=2)),
    ):
        table = TransformTable.build(k, v, range(4), kv_heads=range(heads), device="cpu")
        assert table.nbytes == transform_bytes(k, v, 4, heads)
