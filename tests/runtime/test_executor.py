"""The kernels inside the plugin: the same steps through `KernelExecutor` and `TorchExecutor` give
the same attention.

Interpreted in float32 without a GPU. Requests of different lengths are prefilled in chunks,
extended by a few tokens and decoded together, with transforms that are no rotations and with keys
that are centred.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cache_oracle import general_set

from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.decode_attention.dispatch import decode_attention
from oscar_kernels.kv_write.dispatch import write_kv_int2
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import executor
from oscar_zoo.runtime.batch import DecodeTables, extend_batch
from oscar_zoo.runtime.executor import Executor, executor_bytes
from oscar_zoo.runtime.plain_prefill import PlainPrefill
from oscar_zoo.runtime.sink_blocks import PromptKey
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.step import Step, StepRequest
from oscar_zoo.runtime.torch_executor import TorchExecutor
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

HEADS, GROUP, DIM, SINK, RECENT = 2, 3, 32, 4, 8
SPEC = QuantSpec(DIM, DIM, 0.9, "float16")
SCALING = DIM**-0.5
ROWS, SLOTS, LONGEST = 5, 300, 128
STORES = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")


class Both:
    """Two executors with stores of their own, fed the same steps."""

    def __init__(self, seed: int) -> None:
        sets = [general_set(role, 1, HEADS, DIM, seed=seed) for role in ("k", "v")]
        self.table = TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device="cpu")
        self.stores = [self._stores() for _ in range(2)]
        self.plain = TorchExecutor(*self.stores[0], self.table)
        self.kernels = Executor(
            *self.stores[1],
            self.table,
            num_q_heads=HEADS * GROUP,
            max_batch=3,
            scratch_tokens=7,
            prefill=PlainPrefill(),
        )
        self.req_to_token = (
            torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(seed)).int() + 1
        )
        self.next, self.lengths = 0, [0] * ROWS
        self.slots = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        self.decodes = DecodeTables(3, LONGEST, "cpu")
        self.random = torch.Generator().manual_seed(seed)

    @staticmethod
    def _stores() -> tuple[SlotStore, WindowStore]:
        side = WindowStore(
            WindowShape(1, ROWS, HEADS, DIM, DIM, SINK, RECENT, torch.float32, idle=2), "cpu"
        )
        for ring in (side.ring_k, side.ring_v, side.sink_k, side.sink_v):
            ring.fill_(float("nan"))  # what was never written must not be read
        return SlotStore(SlotShape(1, SLOTS, HEADS, SPEC, SPEC), "cpu"), side

    def begin(self, row: int, shared_with: int | None = None, prefix: int = 0) -> None:
        """A new owner, perhaps of tokens that another row has cached; it shares the first ones."""
        if shared_with is not None:
            self.slots[row, :prefix] = self.slots[shared_with, :prefix]
        self.lengths[row] = prefix
        first = (row if shared_with is None else shared_with,) * SINK
        for _, side in self.stores:
            side.sinks.expect([row], [PromptKey((), first, LONGEST)])
            side.begin({row: prefix})
            if shared_with is not None:
                assert (
                    side.sink_block[row] == side.sink_block[shared_with] != 0 == side.sink_from[row]
                )

    def step(self, new: dict[int, int], *, decode: bool = False) -> float:
        """One step; the largest difference of outputs."""
        rows = list(new)
        prefixes, counts = [self.lengths[row] for row in rows], list(new.values())
        for _, side in self.stores:
            side.sinks.launched(rows, [p + n for p, n in zip(prefixes, counts, strict=True)])
        total = sum(counts)
        written = self.req_to_token[self.next : self.next + total]
        self.next += total
        at = 0
        for row, prefix, count in zip(rows, prefixes, counts, strict=True):
            self.slots[row, prefix : prefix + count] = written[at : at + count]
            at += count
            self.lengths[row] += count
        shapes = (HEADS * GROUP, HEADS, HEADS)
        q, k, v = (torch.randn(total, heads, DIM, generator=self.random) for heads in shapes)
        cached = [n + 1 if decode else n for n in prefixes]
        covers = self.stores[0][1].coverage(rows, cached)
        requests = tuple(
            StepRequest(row, prefix, count, cover, self.slots[row, : cover.length].long())
            for row, prefix, count, cover in zip(rows, prefixes, counts, covers, strict=True)
        )
        step = Step(requests, written.long(), decode)
        windows, table = self.kernels.windows, self.slots
        if decode:
            lengths = torch.tensor([self.lengths[row] for row in rows])
            self.decodes.fill(table, torch.tensor(rows), lengths)
            batch = self.decodes.batch(torch.tensor(rows), lengths, written.long(), windows)
            got = self.kernels.decode(0, q, k, v, batch, scaling=SCALING)
            return float((got - self.plain.decode(0, q, k, v, step, scaling=SCALING)).abs().max())
        extend = extend_batch(
            table, torch.tensor(rows), written.long(), prefixes, counts, windows, piece=7
        )
        self.kernels.prefill.begin(extend)
        got = self.kernels.extend(0, q, k, v, extend, scaling=SCALING)
        return float((got - self.plain.extend(0, q, k, v, step, scaling=SCALING)).abs().max())

    def check_stores(self) -> None:
        """Codes and windows agree; a code may differ by one where a value lies on a tie."""
        (slots, side), (other_slots, other_side) = self.stores
        assert (slots.codes[0] != other_slots.codes[0]).float().mean() < 0.005
        for mine, theirs in ((side.ring_k, other_side.ring_k), (side.sink_v, other_side.sink_v)):
            torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "short", [256, 1], ids=["short extends by themselves", "by pieces of prefix"]
)
def test_both_executors_give_the_same_attention(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SHORT", short)
    both = Both(seed=5)
    for row in (1, 3):
        both.begin(row)
    assert both.step({1: 21, 3: 2}) < 1e-5  # no prefix
    assert both.step({3: 17, 1: 5}) < 1e-4  # chunks over their own prefix
    both.begin(4, shared_with=1, prefix=19)
    first = both.stores[1][1].sink_k[0, int(both.stores[1][1].sink_block[1])].clone()
    assert both.step({4: 3, 1: 1}) < 1e-4  # a prefix of another, and a decode row of a mixed batch
    for _ in range(4):
        assert both.step({1: 1, 3: 1, 4: 1}, decode=True) < 1e-4
    both.check_stores()
    assert (
        both.stores[1][1].sink_k[0, int(both.stores[1][1].sink_block[4])].equal(first)
    )  # nobody wrote there again


@pytest.mark.parametrize("recent", [1, 8])
def test_attention_that_may_start_before_the_write_ends_reads_only_the_newest_row_of_it(
    recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "RECENT", recent)
    both = Both(seed=8)
    for row in (1, 3):
        both.begin(row)
    both.step({1: 21, 3: 3})
    early = list[LayerCache]()
    checked = 0

    def write(k: Tensor, v: Tensor, cache: LayerCache, *others: Any, **options: Any) -> None:
        early.append(replace(cache, **{name: getattr(cache, name).clone() for name in STORES}))
        write_kv_int2(k, v, cache, *others, **options)

    def attention(
        query: Tensor, cache: LayerCache, view: BatchView, *, prefix_stable: bool, **options: Any
    ) -> Tensor:
        nonlocal checked
        out = decode_attention(query, cache, view, prefix_stable=prefix_stable, **options).clone()
        assert prefix_stable, "a step that waits for the whole write is slower"
        before = early.pop()
        last, blocks = (
            view.kv_indptr.diff()[: len(view.rows)] - 1,
            view.windows.sink_block[view.rows],
        )
        for side in "kv":
            ring, sink = f"ring_{side}", f"sink_{side}"
            getattr(before, ring)[view.rows, last % recent] = getattr(cache, ring)[
                view.rows, last % recent
            ]
            new, at = blocks[last < SINK], last[last < SINK]
            getattr(before, sink)[new, at] = getattr(cache, sink)[new, at]
        again = decode_attention(query, before, view, prefix_stable=prefix_stable, **options)
        assert torch.equal(again, out)
        checked += 1
        return out

    monkeypatch.setattr(executor, "write_kv_int2", write)
    monkeypatch.setattr(executor.dispatch, "decode_attention", attention)
    for _ in range(2):  # the newest token of one request is a sink at first
        both.step({1: 1, 3: 1}, decode=True)
    assert checked == 2


def test_the_comparison_sees_a_partner_that_is_wrong() -> None:
    both = Both(seed=6)
    wrong = both.kernels.transforms[0]
    both.kernels.transforms = (replace(wrong, q_partner=wrong.k_forward),)
    both.begin(1)
    both.step({1: 30})
    assert both.step({1: 1}, decode=True) > 1e-2


def test_the_plan_counts_what_an_executor_allocates() -> None:
    both = Both(seed=7)
    slots, side = both.stores[1]
    heads = HEADS * GROUP
    made = Executor(
        slots,
        side,
        both.table,
        num_q_heads=heads,
        max_batch=ROWS,
        scratch_tokens=7,
        prefill=PlainPrefill(),
    )
    held = (*made.scratch, made.decode_scratch.scratch, made.extend_scratch.scratch)
    counted = executor_bytes(
        slots.shape, side.shape, num_q_heads=heads, scratch_tokens=7, device="cpu"
    )
    assert counted == sum(tensor.nbytes for tensor in held)
