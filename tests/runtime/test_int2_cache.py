"""From an engine's steps to the kernels: prefill with padding, eager decode, and decode through
views that a graph holds.

The kernels are interpreted without a GPU. A second cache with their references says what is right.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from cache_oracle import PlainPrefill
from small_caches import CacheShape
from torch import Tensor

from oscar_zoo.errors import UnsupportedMachine
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, choose_ops
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.int2_cache import cache_bytes, flashinfer_has, make_prefill, piece_tokens

SHAPE = CacheShape()


class Worker:
    """Two caches, one with the kernels and one with the references, fed the same tokens.

    Args:
        ranks: to a multiple of which the engine pads the requests of a step.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.shape = replace(SHAPE, ranks=ranks)
        table, self.slots_of = self.shape.table(), self.shape.slot_table()
        whole = replace(self.shape, piece=16)
        self.kernels = whole.cache(KERNELS, table, self.slots_of, PlainPrefill())
        self.plain = self.shape.cache(REFERENCES, table, self.slots_of)
        self.next, self.random = 1, torch.Generator().manual_seed(1)

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (torch.randn(tokens, n, generator=self.random) for n in self.shape.widths)
        return q, k, v

    def place(self, row: int, prefix: int, new: int) -> Tensor:
        written = torch.arange(self.next, self.next + new)
        self.next += new
        self.slots_of[row, prefix : prefix + new] = written.int()
        return written


def extend(
    rows: list[int], prefix_lens: list[int], extend_lens: list[int], out: Tensor
) -> StepInput:
    lengths = torch.tensor([p + n for p, n in zip(prefix_lens, extend_lens, strict=True)])
    on_host = tuple(rows), tuple(prefix_lens), tuple(extend_lens)
    return StepInput("extend", torch.tensor(rows), on_host[0], lengths, out, *on_host[1:])


def prefill(worker: Worker, new: dict[int, int], padding: int) -> None:
    written = torch.cat([worker.place(row, 0, n) for row, n in new.items()])
    rows = worker.rows(len(written) + padding)
    outputs = []
    for cache in (worker.kernels, worker.plain):
        cache.windows.hand_out(list(new))
        cache.begin(extend(list(new), [0] * len(new), list(new.values()), written))
        assert not cache.windows.fresh
        outputs.append(cache.forward(0, *rows))
    got, expected = outputs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert got[: len(written)].any()
    assert not got[len(written) :].any() and len(got) == len(rows[0])


def test_prefill_decode_and_a_graphs_views() -> None:
    worker = Worker()
    prefill(worker, {1: 21, 3: 9}, padding=3)
    lengths = {1: 21, 3: 9}
    # The buffers of a graph for three requests: two real ones, and one of padding in row 0.
    held = torch.tensor([1, 3, 0]), torch.tensor([22, 10, 1]), torch.zeros(3, dtype=torch.int64)
    for step in range(3):
        for at, row in enumerate(lengths):
            held[2][at] = worker.place(row, lengths[row], 1)
            held[1][at] = lengths[row] + 1
        given, rows = StepInput("decode", held[0], (), *held[1:]), worker.rows(3)
        if step:  # later steps only fill what the first one's views show
            worker.kernels.refill(given)
        else:
            worker.kernels.begin(given)
        got = worker.kernels.forward(0, *rows)
        rows_of, lengths_of, out_loc = (x[:2] for x in held)
        worker.plain.begin(StepInput("decode", rows_of, (1, 3), lengths_of, out_loc))
        expected = worker.plain.forward(0, *(x[:2] for x in rows))
        torch.testing.assert_close(got[:2], expected, atol=1e-4, rtol=1e-3)
        assert got.isfinite().all()
        lengths = {row: n + 1 for row, n in lengths.items()}


def test_a_step_that_is_padded_to_a_multiple_of_the_ranks() -> None:
    """Three requests that eight ranks pad to eight."""
    worker = Worker(ranks=8)
    prefill(worker, {1: 5, 2: 9, 3: 7}, padding=0)
    rows = torch.tensor([1, 2, 3, *([0] * 5)])
    lengths = torch.tensor([6, 10, 8, *([1] * 5)])
    written = torch.cat([worker.place(row, int(lengths[row - 1]) - 1, 1) for row in (1, 2, 3)])
    out_loc, new = torch.zeros(8, dtype=torch.int64), worker.rows(8)
    out_loc[:3] = written
    worker.kernels.begin(StepInput("decode", rows, (), lengths, out_loc))
    worker.plain.begin(StepInput("decode", rows[:3], (1, 2, 3), lengths[:3], written))
    got = worker.kernels.forward(0, *new)
    expected = worker.plain.forward(0, *(x[:3] for x in new))
    torch.testing.assert_close(got[:3], expected, atol=1e-4, rtol=1e-3)


def test_only_a_new_owner_resets_a_row() -> None:
    worker = Worker()
    prefill(worker, {1: 21}, padding=0)
    windows = worker.plain.windows
    block = int(windows.sink_block[1])
    written = worker.place(1, 21, 4)
    worker.plain.begin(extend([1], [21], [4], written))  # the next chunk
    assert windows.ring_start[1] == 0 and windows.sink_block[1] == block
    windows.hand_out([1])
    worker.plain.begin(extend([1], [13], [4], written))  # a hit of another request
    assert windows.ring_start[1] == 13


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_plan_counts_what_a_cache_allocates(ranks: int) -> None:
    worker = Worker(ranks)
    counted = cache_bytes(
        worker.shape.slot_shape,
        worker.shape.window_shape,
        REFERENCES,
        num_q_heads=SHAPE.num_q_heads,
        max_tokens=SHAPE.longest,
        piece_tokens=0,
        device="cpu",
    )
    assert worker.plain.report() == {"scratch": counted}


def test_a_gpu_never_gets_a_reference() -> None:
    assert choose_ops("cuda") is choose_ops("cuda:1") is KERNELS
    assert choose_ops("cpu") is REFERENCES
    for name in ("write", "decode", "extend", "materialize", "pack", "make_commit"):
        assert not getattr(KERNELS, name).__module__.endswith("reference"), name
    with pytest.raises(UnsupportedMachine, match="no kernels for mps"):
        choose_ops("mps")


def test_a_cpu_has_no_prefill_kernel() -> None:
    assert make_prefill(SHAPE.config, SHAPE.window_shape, of_engine=PlainPrefill) is None
    assert piece_tokens("cpu") == 0 < piece_tokens("cuda")


@pytest.mark.parametrize(("k", "v"), [(512, 512), (96, 96), (256, 128)])
def test_heads_that_flashinfer_does_not_have_are_prefilled_by_the_engine(k: int, v: int) -> None:
    """FlashInfer would compile a kernel for any width."""
    config = replace(SHAPE.config, device="cuda")
    shape = replace(SHAPE.window_shape, k_head_dim=k, v_head_dim=v)
    assert isinstance(make_prefill(config, shape, of_engine=PlainPrefill), PlainPrefill)
    assert not flashinfer_has(shape)
    assert flashinfer_has(replace(shape, k_head_dim=192, v_head_dim=128))
