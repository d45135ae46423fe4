"""The memory plan: the numbers of the design, the error when nothing is left, and the line for the
log."""

from __future__ import annotations

import pytest
import torch
from tiny_artifacts import rotation

from oscar_kernels.spec import QuantSpec
from oscar_zoo.errors import UsageError
from oscar_zoo.runtime.memory_plan import describe, plan, too_short
from oscar_zoo.runtime.slot_store import SlotShape
from oscar_zoo.runtime.transforms import TransformTable, transform_bytes
from oscar_zoo.runtime.window_store import WindowShape

SPEC = QuantSpec(128, 128, 0.96)
QWEN3_8B = SlotShape.alike(36, 0, 8, SPEC, SPEC)


def windows(rows: int, idle: int = 0) -> WindowShape:
    return WindowShape(36, rows, 8, 128, 128, 64, 256, torch.bfloat16, idle)


def test_one_request_of_qwen3_8b() -> None:
    assert windows(1).token_bytes == 147_456
    assert windows(1).nbytes == 320 * 147_456 + 12


def test_the_budget_is_what_is_left() -> None:
    whole = plan(QWEN3_8B, windows(65, idle=64), transforms=4_718_592)
    assert whole.slot == 20_736
    assert whole.windows == (65 * 256 + 129 * 64) * 147_456 + 65 * 12
    assert whole.budget(10**10) == 10**10 - whole.windows - 4_718_592


def test_too_little_memory_says_how_much_is_needed_and_what_to_lower() -> None:
    whole = plan(QWEN3_8B, windows(65, idle=64), transforms=4_718_592, scratch=100_000_000)
    assert whole.budget(whole.fixed + whole.slot) == whole.slot
    with pytest.raises(UsageError) as caught:
        whole.budget(2 * 10**9)
    for part in (
        "for 64 requests",
        "more than 3776 MB",
        "20736 bytes per token",
        "only 2000 MB are there",
    ):
        assert part in caught.value.message
    assert str(caught.value.hint).startswith(
        "--max-running-requests 15 (56.5 MB each), or lower --oscar-idle-sinks"
    )


def test_the_number_of_requests_in_the_hint_fits() -> None:
    smaller = plan(QWEN3_8B, windows(1 + 15, idle=15), transforms=4_718_592, scratch=100_000_000)
    assert smaller.budget(2 * 10**9) > 2 * 10**9 / 2 - 104_718_592


@pytest.mark.parametrize("found", [0, -5, 10**8])
def test_no_number_of_requests_is_named_when_none_fits(found: int) -> None:
    with pytest.raises(UsageError, match=f"only {max(0, found) // 10**6} MB are there") as caught:
        plan(QWEN3_8B, windows(65), transforms=4_718_592).budget(found)
    assert str(caught.value.hint).startswith("raise --mem-fraction-static")


def test_a_pool_too_short_for_one_request_is_a_warning() -> None:
    assert too_short(40_960, 40_960) is None
    warning = too_short(1000, 40_960)
    assert (
        warning is not None and "1000 token slots" in warning and "--context-length 1000" in warning
    )


def test_the_line_for_the_log() -> None:
    line = describe(
        plan(QWEN3_8B, windows(65, 64), 4_718_592), QWEN3_8B, windows(65, 64), tokens=100_000
    )
    for part in (
        "100000 token slots of 20736 bytes (2.25 bits per element)",
        "65 request rows (256 recent tokens each)",
        "129 sink blocks (64 first tokens each, 64 for finished requests)",
        "6.25 bits per element of a full pool",
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
