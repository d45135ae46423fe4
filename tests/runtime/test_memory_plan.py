"""The memory plan: the numbers of the design, the error when nothing is left, and the line for the
log."""

import pytest
import torch

from oscar_kernels.spec import QuantSpec
from oscar_zoo.errors import UsageError
from oscar_zoo.runtime.memory_plan import plan
from oscar_zoo.runtime.stores import SlotShape, WindowShape

SPEC = QuantSpec(128, 128, 0.96)
QWEN3_8B = SlotShape.alike(36, 0, 8, SPEC, SPEC)


def windows(rows: int, idle: int = 0) -> WindowShape:
    return WindowShape(36, rows, 8, 128, 128, 64, 256, torch.bfloat16, idle)


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
    for part in ("64 requests", "than 3776 MB", "20736 bytes per token", "only 2000 MB are there"):
        assert part in caught.value.message
    assert str(caught.value.hint).startswith("--max-running-requests 15 (56.5 MB each)")


@pytest.mark.parametrize("found", [0, -5, 10**8])
def test_no_number_of_requests_is_named_when_none_fits(found: int) -> None:
    with pytest.raises(UsageError, match=f"only {max(0, found) // 10**6} MB are there") as caught:
        plan(QWEN3_8B, windows(65), transforms=4_718_592).budget(found)
    assert str(caught.value.hint).startswith("raise --mem-fraction-static")
