"""The BF16 windows: who is fresh, what is recorded, and which positions are read from them."""

import pytest
import torch
from int2_test_plugin.reads import WindowCoverage, covers
from torch import Tensor

from oscar_kernels.cache import BatchView, LayerCache, TokenTargets, Transforms
from oscar_kernels.reference import cached_rows, write_kv_int2
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.sink_blocks import PromptKey, SinkBlocks
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore

SINK, RECENT = 4, 6


def store(
    sink: int = SINK, recent: int = RECENT, dtype: torch.dtype = torch.float32, idle: int = 0
) -> WindowStore:
    return WindowStore(WindowShape(2, 3, 2, 8, 12, sink, recent, dtype, idle), "cpu")


def layer(side: WindowStore, index: int) -> LayerCache:
    """A layer whose slots all read as NaN."""
    slots = SlotStore(SlotShape.alike(2, 1, 2, QuantSpec(8, 8), QuantSpec(12, 12)), "cpu")
    slots.affine[index].fill_(float("nan"))
    return slots.layer(index, side)


def record(side: WindowStore, index: int, row: int, begin: int, k: Tensor, v: Tensor) -> None:
    """Write positions `begin`, `begin + 1`, ... of a request into its windows."""
    same = Transforms(*(torch.eye(dim)[None] for dim in (8, 8, 12, 12)))
    at = torch.arange(begin, begin + len(k))
    targets = TokenTargets(0 * at, 0 * at + row, at, 0 * at + begin + len(k))
    write_kv_int2(k, v, layer(side, index), same, targets, windows=side.state, parts="windows")


def view(side: WindowStore, row: int, length: int) -> BatchView:
    """One request with `length` cached tokens."""
    indptr, slots = torch.tensor([0, length]), torch.zeros(length, dtype=torch.int64)
    return BatchView(indptr, slots, torch.tensor([row]), side.state)


def read(side: WindowStore, index: int, row: int, length: int) -> tuple[Tensor, Tensor]:
    """All rows of a request; NaN where they come from a slot."""
    return cached_rows(layer(side, index), view(side, row, length), 0, torch.float32)


def cover_of(side: WindowStore, row: int, length: int) -> WindowCoverage:
    (cover,) = covers(layer(side, 0), view(side, row, length))
    return cover


def rows(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values whose content is their position."""
    at = torch.arange(first, last, dtype=torch.float32)[:, None, None]
    return at.expand(-1, 2, 8).clone(), -at.expand(-1, 2, 12).clone()


def test_rejected_drafts_overwrite_nothing_that_is_read_again() -> None:
    """A step writes 3 drafts, of which the first stays: the request goes on one token longer."""
    side = WindowStore(WindowShape(2, 3, 2, 8, 12, SINK, RECENT, torch.float32, drafts=3), "cpu")
    side.begin({2: 0})
    assert side.ring_k.shape[2] == side.shape.ring_rows == RECENT + 2
    assert side.nbytes == side.shape.nbytes
    record(side, 1, 2, 0, *rows(0, 20))
    for end in range(20, 40):
        record(side, 1, 2, end, *rows(end, end + 1))
        record(side, 1, 2, end + 1, *rows(900, 902))
        k, _ = read(side, 1, 2, end + 1)
        assert k[-RECENT:, 0, 0].tolist() == [*range(end + 1 - RECENT, end + 1)]


@pytest.mark.parametrize(
    ("requests", "ranks", "most"), [(6, 1, 7), (6, 4, 8), (12, 8, 16), (8, 4, 9), (1, 8, 8)]
)
def test_a_batch_may_be_padded_to_multiples_of_ranks(requests: int, ranks: int, most: int) -> None:
    shape = WindowShape(2, requests + 1, 2, 8, 12, SINK, RECENT, torch.float32, ranks=ranks)
    assert shape.max_batch == most


@pytest.mark.parametrize("steps", [[20], [3, 1, 1], [6, 6, 6], [1] * 20, [5, 30, 1], [2]])
@pytest.mark.parametrize(("sink", "recent"), [(SINK, RECENT), (0, 1), (7, 3)])
def test_what_was_recorded_is_what_is_read(steps: list[int], sink: int, recent: int) -> None:
    side, end = store(sink, recent), 0
    side.begin({1: 0, 2: 0})
    for size in steps:
        record(side, 1, 2, end, *rows(end, end + size))
        end += size
    cover, (k, v) = cover_of(side, 2, end), read(side, 1, 2, end)
    exact = sorted({*cover.sink, *cover.ring})
    for got, want in zip((k, v), rows(0, end), strict=True):
        assert got[exact].equal(want[exact])
    assert k[[p for p in range(end) if p not in exact]].isnan().all()
    assert not side.ring_k[0].any() and not side.ring_k[1, :2].any()
    assert not side.sink_k[0].any() and not side.sink_k[1, : int(side.sink_block[2])].any()


def sharing(prefix: int, idle: int) -> WindowStore:
    """Row 1 has 20 tokens, of which row 2 hits the first `prefix`."""
    side, same = store(idle=idle), PromptKey((), (7,) * SINK, 20)
    side.sinks.admit([1, 2], [same, same])
    side.begin({1: 0})
    side.sinks.launched([1], [20])
    record(side, 0, 1, 0, *rows(0, 20))
    side.begin({2: prefix})
    return side


def test_rows_read_the_block_they_share() -> None:
    side = sharing(10, idle=1)
    assert side.sink_block[2] == side.sink_block[1] > 0 == side.sink_block[0]
    cover = cover_of(side, 2, 20)
    assert cover == WindowCoverage(20, range(SINK), range(14, 20))
    assert cover.compressed_sinks(SINK) == 0
    assert read(side, 0, 2, 20)[0][:SINK].equal(rows(0, SINK)[0])


def test_a_prefix_inside_the_sinks_is_copied() -> None:
    side = sharing(2, idle=0)
    record(side, 0, 2, 2, *rows(2, 20))
    both = side.sink_block[1:].long()
    assert both[0] != both[1] and side.sink_from[2] == 0
    for sinks in (side.sink_k, side.sink_v):
        assert sinks[0, both[0]].equal(sinks[0, both[1]]) and sinks[0, both[1], 1].any()


def test_a_new_owner_sees_nothing_of_the_old_one() -> None:
    side = store()
    record(side, 0, 1, 0, *rows(0, 30))
    side.begin({1: 9})
    assert cover_of(side, 1, 9) == WindowCoverage(9, range(SINK, SINK), range(9, 9))
    record(side, 0, 1, 9, *rows(9, 11))
    assert cover_of(side, 1, 11) == WindowCoverage(11, range(SINK, SINK), range(9, 11))
    side.begin({1: 2})
    record(side, 0, 1, 2, *rows(2, 13))
    assert cover_of(side, 1, 13) == WindowCoverage(13, range(2, SINK), range(7, 13))


def test_rows_are_fresh_once() -> None:
    side = store()
    side.hand_out([1, 2])
    assert side.take_fresh([2, 0]) == [2]
    assert side.take_fresh([2, 1]) == [1]
    assert side.take_fresh([1, 2]) == []
    assert side.fresh == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_counted_before_they_are_allocated(dtype: torch.dtype) -> None:
    side, token = store(dtype=dtype, idle=2), 2 * 2 * 20 * dtype.itemsize
    assert side.nbytes == side.shape.nbytes == 3 * RECENT * token + (3 + 2) * SINK * token + 3 * 12


@pytest.mark.parametrize(("recent", "drafts"), [(0, 1), (RECENT, 7)])
def test_windows_that_cannot_hold_a_step_are_refused(recent: int, drafts: int) -> None:
    with pytest.raises(ValueError):
        WindowShape(1, 1, 1, 4, 4, 0, recent, torch.float32, drafts=drafts)


def test_a_block_comes_back_from_the_host() -> None:
    sinks = SinkBlocks(SINK, 1 + 2, RECENT, host=1)
    side = WindowStore(WindowShape(2, 3, 2, 8, 12, SINK, RECENT, torch.float32), "cpu", sinks)
    prompts = [PromptKey((), tuple(range(at, at + SINK)), 20) for at in (0, 100, 200)]
    for at in (0, 1, 2, 0):  # the first block is given away in front of the third prompt
        sinks.admit([1], [prompts[at]])
        back = sinks.idle == 2 and at == 0
        side.begin({1: 12 if back else 0})
        for index in (0, 1) if not back else ():
            k, v = rows(0, SINK)
            record(side, index, 1, 0, k + 10 * at, v)
        sinks.launched([1], [20])
        sinks.release(1, prompts[at])
    assert (sinks.host_hits, sinks.lost, int(side.sink_from[1])) == (1, 0, 0)
    for index in range(2):
        assert read(side, index, 1, 13)[0][:SINK, 0, 0].tolist() == [0, 1, 2, 3]
