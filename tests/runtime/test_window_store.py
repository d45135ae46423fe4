"""The uncompressed tier: who is fresh, what is recorded, and which positions are read from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.runtime.sink_blocks import PromptKey
from oscar_zoo.runtime.window_store import WindowCoverage, WindowShape, WindowStore, coverage

SINK, RECENT = 4, 6


def store(
    sink: int = SINK, recent: int = RECENT, dtype: torch.dtype = torch.float32, idle: int = 0
) -> WindowStore:
    return WindowStore(WindowShape(2, 3, 2, 8, 12, sink, recent, dtype, idle), "cpu")


def rows(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values whose content is their position."""
    at = torch.arange(first, last, dtype=torch.float32)[:, None, None]
    return at.expand(-1, 2, 8).clone(), -at.expand(-1, 2, 12).clone()


@pytest.mark.parametrize(
    ("length", "sink", "ring"),
    [
        (0, range(0), range(0)),
        (3, range(3), range(3)),
        (SINK, range(SINK), range(SINK)),
        (RECENT, range(SINK), range(RECENT)),
        (RECENT + 1, range(SINK), range(1, RECENT + 1)),
        (SINK + RECENT, range(SINK), range(SINK, SINK + RECENT)),
        (50, range(SINK), range(44, 50)),
    ],
)
def test_coverage_of_a_request_that_owns_everything(length: int, sink: range, ring: range) -> None:
    assert coverage(length, sink=SINK, recent=RECENT, sink_from=0, ring_start=0) == WindowCoverage(
        length, sink, ring
    )


@given(
    length=st.integers(0, 60),
    sink=st.integers(0, 20),
    recent=st.integers(1, 20),
    sink_from=st.integers(0, 40),
    ring_start=st.integers(0, 40),
)
def test_every_position_is_read_exactly_once(
    length: int, sink: int, recent: int, sink_from: int, ring_start: int
) -> None:
    cover = coverage(length, sink=sink, recent=recent, sink_from=sink_from, ring_start=ring_start)
    wanted = {
        p for p in range(length) if sink_from <= p < sink or p >= max(length - recent, ring_start)
    }
    assert {*cover.sink, *cover.ring} == wanted
    assert cover.compressed == length - len(wanted)


@pytest.mark.parametrize("steps", [[20], [3, 1, 1], [6, 6, 6], [1] * 20, [5, 30, 1], [2]])
@pytest.mark.parametrize(("sink", "recent"), [(SINK, RECENT), (0, 1), (7, 3)])
def test_what_was_recorded_is_what_is_read(steps: list[int], sink: int, recent: int) -> None:
    side, end = store(sink, recent), 0
    side.begin({1: 0, 2: 0})
    for size in steps:
        side.record(1, 2, end, *rows(end, end + size))
        end += size
    (cover,) = side.coverage([2], [end])
    k, v = torch.full((end, 2, 8), torch.nan), torch.full((end, 2, 12), torch.nan)
    side.overlay(1, 2, cover, k, v)
    want_k, want_v = rows(0, end)
    read = sorted({*cover.sink, *cover.ring})
    torch.testing.assert_close(k[read], want_k[read], atol=0, rtol=0)
    torch.testing.assert_close(v[read], want_v[read], atol=0, rtol=0)
    assert k[[p for p in range(end) if p not in read]].isnan().all()
    assert not side.ring_k[0].any() and not side.ring_k[1, :2].any()
    assert not side.sink_k[0].any() and not side.sink_k[1, : int(side.sink_block[2])].any()


def test_rows_read_the_block_they_share() -> None:
    side, same = store(idle=1), PromptKey((), (7,) * SINK, 20)
    side.sinks.expect([1, 2], [same, same])
    side.begin({1: 0})
    side.sinks.launched([1], [20])
    side.record(0, 1, 0, *rows(0, 20))
    side.begin({2: 10})
    assert side.sink_block[2] == side.sink_block[1] > 0 == side.sink_block[0]
    (cover,) = side.coverage([2], [20])
    assert (
        cover == WindowCoverage(20, range(SINK), range(14, 20))
        and cover.compressed_sinks(SINK) == 0
    )
    k, v = torch.zeros(20, 2, 8), torch.zeros(20, 2, 12)
    side.overlay(0, 2, cover, k, v)
    torch.testing.assert_close(k[:SINK], rows(0, SINK)[0], atol=0, rtol=0)


def test_a_prefix_inside_the_sinks_is_copied() -> None:
    side, same = store(), PromptKey((), (7,) * SINK, 20)
    side.sinks.expect([1, 2], [same, same])
    side.begin({1: 0})
    side.sinks.launched([1], [20])
    side.record(0, 1, 0, *rows(0, 20))
    side.begin({2: 2})
    side.record(0, 2, 2, *rows(2, 20))
    both = side.sink_block[1:].long()
    assert both[0] != both[1] and side.sink_from[2] == 0
    for sinks in (side.sink_k, side.sink_v):
        assert sinks[0, both[0]].equal(sinks[0, both[1]]) and sinks[0, both[1], 1].any()


def test_first_tokens_that_are_read_compressed_are_counted() -> None:
    assert [
        WindowCoverage(n, range(2, 2), range(3, n)).compressed_sinks(SINK) for n in (0, 2, 3, 4, 9)
    ] == [
        0,
        2,
        3,
        3,
        3,
    ]


def test_a_new_owner_sees_nothing_of_the_old_one() -> None:
    side = store()
    side.record(0, 1, 0, *rows(0, 30))
    side.begin({1: 9})
    assert side.coverage([1], [9]) == [WindowCoverage(9, range(SINK, SINK), range(9, 9))]
    side.record(0, 1, 9, *rows(9, 11))
    assert side.coverage([1], [11]) == [WindowCoverage(11, range(SINK, SINK), range(9, 11))]
    side.begin({1: 2})
    side.record(0, 1, 2, *rows(2, 13))
    assert side.coverage([1], [13]) == [WindowCoverage(13, range(2, SINK), range(7, 13))]


def test_rows_are_fresh_once() -> None:
    side = store()
    side.hand_out([1, 2])
    assert side.take_fresh([2, 0]) == [2]
    assert side.take_fresh([2, 1]) == [1]
    assert side.take_fresh([1, 2]) == []
    assert side.fresh == set()


def test_windows_keep_the_type_of_the_model() -> None:
    side = store(dtype=torch.bfloat16)
    k, v = rows(0, 3)
    side.record(0, 1, 0, k + 1 / 512, v)
    out_k, out_v = torch.zeros(3, 2, 8), torch.zeros(3, 2, 12)
    side.overlay(0, 1, side.coverage([1], [3])[0], out_k, out_v)
    torch.testing.assert_close(out_k, (k + 1 / 512).bfloat16().float(), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_counted_before_they_are_allocated(dtype: torch.dtype) -> None:
    side, token = store(dtype=dtype, idle=2), 2 * 2 * 20 * dtype.itemsize
    assert side.nbytes == side.shape.nbytes == 3 * RECENT * token + (3 + 2) * SINK * token + 3 * 12


def test_a_window_needs_one_token() -> None:
    with pytest.raises(ValueError, match="recent 0 at least 1"):
        WindowShape(1, 1, 1, 4, 4, 0, 0, torch.float32)
