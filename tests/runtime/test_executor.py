"""The kernels inside the executor: the same steps by the kernels and by their references give the
same attention.

The kernels are interpreted in float32 without a GPU. Requests of different lengths are prefilled in
chunks, extended by a few tokens and decoded together, with transforms that are no rotations and
with keys that are centred.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cache_oracle import general_set
from plain_prefill import PlainPrefill

from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import executor
from oscar_zoo.runtime.batch import BatchTables, decode_batch, extend_batch
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops
from oscar_zoo.runtime.engine import SlotTable
from oscar_zoo.runtime.executor import Executor, executor_bytes
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.sink_blocks import PromptKey
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.softmax import Softmax
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

HEADS, GROUP, DIM, SINK, RECENT = 2, 3, 32, 4, 8
SPEC = QuantSpec(DIM, DIM, 0.9, "float16")
SCALE = DIM**-0.5
ROWS, SLOTS, LONGEST, PIECE = 5, 300, 128, 7
STORES = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")


PLAIN = Softmax(SCALE)


class Machine:
    """An executor with stores of its own."""

    def __init__(self, table: TransformTable, ops: Ops, prefill: Prefill | None) -> None:
        self.windows = WindowStore(
            WindowShape(1, ROWS, HEADS, DIM, DIM, SINK, RECENT, torch.float32, idle=2), "cpu"
        )
        for ring in (
            self.windows.ring_k,
            self.windows.ring_v,
            self.windows.sink_k,
            self.windows.sink_v,
        ):
            ring.fill_(float("nan"))  # what was never written must not be read
        self.slots = SlotStore(SlotShape(1, SLOTS, HEADS, SPEC, SPEC), "cpu")
        self.tables = BatchTables(3, LONGEST, "cpu")
        self.executor = Executor(
            [self.slots.layer(0, self.windows)],
            self.windows.state,
            table.layers,
            ops,
            prefill,
            num_q_heads=HEADS * GROUP,
            max_batch=3,
            scratch_tokens=PIECE if prefill else 0,
        )


class Both:
    """Two machines, one with the references and one with the kernels, fed the same steps."""

    def __init__(self, seed: int, kernels: Ops = KERNELS, softmax: Softmax = PLAIN) -> None:
        self.softmax = softmax
        sets = [general_set(role, 1, HEADS, DIM, seed=seed) for role in ("k", "v")]
        if softmax.cap:  # does not go with centred keys
            layers = tuple(replace(layer, mean=None) for layer in sets[0].layers)
            sets[0] = replace(sets[0], centered=False, layers=layers)
        self.table = TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device="cpu")
        self.plain = Machine(self.table, REFERENCES, None)
        self.kernels = Machine(self.table, kernels, PlainPrefill())
        self.machines = (self.plain, self.kernels)
        self.order = (
            torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(seed)).int() + 1
        )
        self.next, self.lengths = 0, [0] * ROWS
        self.slots = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        self.random = torch.Generator().manual_seed(seed)

    def begin(self, row: int, shared_with: int | None = None, prefix: int = 0) -> None:
        """A new owner, perhaps of tokens that another row has cached; it shares the first ones."""
        if shared_with is not None:
            self.slots[row, :prefix] = self.slots[shared_with, :prefix]
        self.lengths[row] = prefix
        first = (row if shared_with is None else shared_with,) * SINK
        for machine in self.machines:
            windows = machine.windows
            windows.sinks.admit([row], [PromptKey((), first, LONGEST)])
            windows.begin({row: prefix})
            if shared_with is not None:
                block = windows.sink_block[row]
                assert block == windows.sink_block[shared_with] != 0 == windows.sink_from[row]

    def step(self, new: dict[int, int], *, decode: bool = False) -> float:
        """One step; the largest difference of outputs."""
        rows, counts = list(new), list(new.values())
        prefixes = [self.lengths[row] for row in rows]
        for machine in self.machines:
            machine.windows.sinks.launched(
                rows, [p + n for p, n in zip(prefixes, counts, strict=True)]
            )
        total = sum(counts)
        written = self.order[self.next : self.next + total]
        self.next += total
        at = 0
        for row, prefix, count in zip(rows, prefixes, counts, strict=True):
            self.slots[row, prefix : prefix + count] = written[at : at + count]
            at += count
            self.lengths[row] += count
        shapes = (HEADS * GROUP, HEADS, HEADS)
        rows_of = [torch.randn(total, heads, DIM, generator=self.random) for heads in shapes]
        want, got = (
            self._run(machine, rows, prefixes, counts, written, rows_of, decode=decode)
            for machine in self.machines
        )
        return float((got - want).abs().max())

    def _run(
        self,
        machine: Machine,
        rows: list[int],
        prefixes: list[int],
        counts: list[int],
        written: Tensor,
        rows_of: list[Tensor],
        *,
        decode: bool,
    ) -> Tensor:
        made, state = machine.executor, machine.windows.state
        source, on_device = SlotTable(self.slots, made.ops.pack), torch.tensor(rows)
        if decode:
            lengths = torch.tensor([self.lengths[row] for row in rows])
            machine.tables.fill(source, on_device, lengths)
            batch = decode_batch(machine.tables, on_device, lengths, written.long(), state)
        else:
            pieces = PIECE if made.prefill else 0
            batch = extend_batch(
                source, on_device, written.long(), prefixes, counts, state, piece_tokens=pieces
            )
            made.begin(batch)
        return made.forward(0, *rows_of, batch, self.softmax)

    def check_stores(self) -> None:
        """Codes and windows agree; a code may differ by one where a value lies on a tie."""
        one, other = self.machines
        assert (one.slots.codes[0] != other.slots.codes[0]).float().mean() < 0.005
        for name in ("ring_k", "sink_v"):
            mine, theirs = getattr(one.windows, name), getattr(other.windows, name)
            torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)


SINKS = torch.linspace(-2.0, 3.0, HEADS * GROUP)


@pytest.mark.parametrize(
    "softmax",
    [PLAIN, Softmax(SCALE, sinks=SINKS), Softmax(SCALE, cap=1.5)],
    ids=["plain", "learned sinks", "cap"],
)
@pytest.mark.parametrize(
    "short", [256, 1], ids=["short extends by themselves", "by pieces of prefix"]
)
def test_kernels_and_references_give_the_same_attention(
    short: int, softmax: Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SHORT", short)
    both = Both(seed=5, softmax=softmax)
    for row in (1, 3):
        both.begin(row)
    assert both.step({1: 21, 3: 2}) < 1e-5  # no prefix
    assert both.step({3: 17, 1: 5}) < 1e-4  # chunks over their own prefix
    both.begin(4, shared_with=1, prefix=19)
    windows = both.kernels.windows
    first = windows.sink_k[0, int(windows.sink_block[1])].clone()
    assert both.step({4: 3, 1: 1}) < 1e-4  # a prefix of another, and a decode row of a mixed batch
    for _ in range(4):
        assert both.step({1: 1, 3: 1, 4: 1}, decode=True) < 1e-4
    both.check_stores()
    assert windows.sink_k[0, int(windows.sink_block[4])].equal(first)  # nobody wrote there again


@pytest.mark.parametrize("recent", [1, 8])
def test_attention_that_may_start_before_the_write_ends_reads_only_the_newest_row_of_it(
    recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "RECENT", recent)
    early = list[LayerCache]()
    checked = 0

    def write(k: Tensor, v: Tensor, cache: LayerCache, *others: Any, **options: Any) -> None:
        early.append(replace(cache, **{name: getattr(cache, name).clone() for name in STORES}))
        KERNELS.write(k, v, cache, *others, **options)

    def attention(
        query: Tensor, cache: LayerCache, view: BatchView, *, prefix_stable: bool, **options: Any
    ) -> Tensor:
        nonlocal checked
        out = KERNELS.decode(query, cache, view, prefix_stable=prefix_stable, **options).clone()
        assert prefix_stable, "a step that waits for the whole write is slower"
        before = early.pop()
        last = view.kv_indptr.diff()[: len(view.rows)] - 1
        blocks = view.windows.sink_block[view.rows]
        for side in "kv":
            ring, sink = f"ring_{side}", f"sink_{side}"
            getattr(before, ring)[view.rows, last % recent] = getattr(cache, ring)[
                view.rows, last % recent
            ]
            new, at = blocks[last < SINK], last[last < SINK]
            getattr(before, sink)[new, at] = getattr(cache, sink)[new, at]
        again = KERNELS.decode(query, before, view, prefix_stable=prefix_stable, **options)
        assert torch.equal(again, out)
        checked += 1
        return out

    both = Both(seed=8, kernels=replace(KERNELS, write=write, decode=attention))
    for row in (1, 3):
        both.begin(row)
    both.step({1: 21, 3: 3})
    for _ in range(2):  # the newest token of one request is a sink at first
        both.step({1: 1, 3: 1}, decode=True)
    assert checked == 2


def test_the_comparison_sees_a_partner_that_is_wrong() -> None:
    both = Both(seed=6)
    made = both.kernels.executor
    wrong = made.transforms[0]
    made.transforms = (replace(wrong, q_partner=wrong.k_forward),)
    both.begin(1)
    both.step({1: 30})
    assert both.step({1: 1}, decode=True) > 1e-2


@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernels", "references"])
def test_the_plan_counts_what_an_executor_allocates(ops: Ops) -> None:
    both = Both(seed=7)
    slots, windows = both.kernels.slots, both.kernels.windows
    made = Executor(
        [slots.layer(0, windows)],
        windows.state,
        both.table.layers,
        ops,
        PlainPrefill(),
        num_q_heads=HEADS * GROUP,
        max_batch=ROWS,
        scratch_tokens=PIECE,
    )
    counted = executor_bytes(
        slots.shape,
        windows.shape,
        ops,
        num_q_heads=HEADS * GROUP,
        scratch_tokens=PIECE,
        device="cpu",
    )
    held = (*made.scratch, made.decode_scratch.scratch, made.extend_scratch.scratch)
    assert counted == sum(tensor.nbytes for tensor in held) == made.nbytes
