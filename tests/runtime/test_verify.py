"""Steps that verify drafts: outputs and stores are those of decode steps over the accepted tokens,
for kernels and references, eager and through the views that a graph holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from cache_oracle import general_set
from torch import Tensor

from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache, cache_bytes
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.softmax import Softmax
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

HEADS, GROUP, DIM, SINK, RECENT, ROWS, COUNT, LONGEST = 2, 2, 32, 6, 8, 4, 4, 100
SPEC = QuantSpec(DIM, DIM, 0.9, "float16")
SLOT_SHAPE = SlotShape.alike(2, 400, HEADS, SPEC, SPEC)
WINDOWS = WindowShape(2, ROWS, HEADS, DIM, DIM, SINK, RECENT, torch.float32, drafts=COUNT)
CONFIG = CacheConfig((0, 1), HEADS * GROUP, Softmax(DIM**-0.5), ROWS, LONGEST, 0, "cpu")
SETS = [general_set(role, 2, HEADS, DIM, seed=2) for role in ("k", "v")]
TABLE = TransformTable.build(*SETS, range(2), kv_heads=range(HEADS), device="cpu")
PARENTS = {"tree": (-1, 0, 0, 2), "bush": (-1, 0, 1, 0), "chain": (-1, 0, 1, 2)}
"""Of each draft: the node that it hangs below."""


@dataclass
class Token:
    """What the model computes of one token, for both layers: `[2, heads * DIM]` each."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, draw: torch.Generator) -> Token:
        heads = (HEADS * GROUP, HEADS, HEADS)
        return cls(*(torch.randn(2, n * DIM, generator=draw) for n in heads))


class Worker:
    """One cache; slots of a request lie anywhere."""

    def __init__(self, ops: Ops, drafts: int = COUNT) -> None:
        self.slots_of = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        windows = WindowStore(replace(WINDOWS, drafts=drafts), "cpu")
        for store in (windows.ring_k, windows.ring_v, windows.sink_k, windows.sink_v):
            store.fill_(float("nan"))  # what was never written must not be read
        stores = SlotStore(SLOT_SHAPE, "cpu"), windows
        source = SlotTable(self.slots_of, ops.pack)
        self.cache = Int2Cache(CONFIG, *stores, TABLE, source, ops=ops, prefill=None)
        self.lengths, self.free = dict[int, int](), list(range(399, 0, -1))

    def place(self, row: int, new: int) -> Tensor:
        """Slots of the next tokens of a row; drafts keep theirs for the next step."""
        at, own = self.lengths[row], self.slots_of[row]
        for position in range(at, at + new):
            if not own[position]:
                own[position] = self.free.pop()
        return own[at : at + new].long()

    def prefill(self, row: int, tokens: Sequence[Token]) -> None:
        self.lengths[row] = 0
        written, count = self.place(row, len(tokens)), len(tokens)
        self.cache.windows.hand_out([row])
        lengths = torch.tensor([count])
        step = StepInput("extend", torch.tensor([row]), (row,), lengths, written, (0,), (count,))
        self.cache.begin(step)
        self.run(tokens)
        self.lengths[row] = count

    def decode(self, tokens: dict[int, Token]) -> Tensor:
        written = torch.cat([self.place(row, 1) for row in tokens])
        lengths = torch.tensor([self.lengths[row] + 1 for row in tokens])
        self.cache.begin(StepInput("decode", torch.tensor([*tokens]), (*tokens,), lengths, written))
        for row in tokens:
            self.lengths[row] += 1
        return self.run([*tokens.values()])

    def verify(self, rows: Sequence[int], drafts: Drafts) -> StepInput:
        written = torch.cat([self.place(row, drafts.count) for row in rows])
        lengths = torch.tensor([self.lengths[row] for row in rows])
        return StepInput("verify", torch.tensor(rows), (), lengths, written, drafts=drafts)

    def run(self, tokens: Sequence[Token]) -> Tensor:
        """Outputs of both layers, `[2, tokens, ...]`."""
        rows = [torch.stack([getattr(one, name) for one in tokens], 1) for name in "qkv"]
        return torch.stack([self.cache.forward(i, *(x[i] for x in rows)) for i in range(2)])


def masks_of(parents: Sequence[int]) -> Tensor:
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor(seen, dtype=torch.int32)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if node else ()), node]


@pytest.mark.parametrize(
    ("shape", "ops", "steps"),
    [
        ("chain", REFERENCES, 6),
        ("tree", REFERENCES, 6),
        ("bush", REFERENCES, 6),
        ("chain", KERNELS, 1),
        ("tree", KERNELS, 1),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_accepted_drafts_are_what_decode_steps_would_have_made_of_them(
    shape: str, ops: Ops, steps: int
) -> None:
    """Two requests, one of which begins inside its sinks; then both go on with decode steps."""
    draw, parents = torch.Generator().manual_seed(3), PARENTS[shape]
    spoken, plain = Worker(ops), Worker(ops, drafts=1)
    for row, count in ((1, 3), (3, 21)):
        prompt = [Token.random(draw) for _ in range(count)]
        spoken.prefill(row, prompt)
        plain.prefill(row, prompt)
    mask = None if shape == "chain" else masks_of(parents).repeat(2)
    for step in range(steps):
        drafts = {row: [Token.random(draw) for _ in range(COUNT)] for row in (1, 3)}
        given = spoken.verify((1, 3), Drafts(COUNT, mask))
        spoken.cache.begin(given)
        outputs = spoken.run([*drafts[1], *drafts[3]]).unflatten(1, (2, COUNT))
        target, source = [], []
        for at, row in enumerate((1, 3)):
            path = path_to(parents, (step + 2 + at) % COUNT)
            for depth, node in enumerate(path):
                want = plain.decode({row: drafts[row][node]})[:, 0]
                torch.testing.assert_close(outputs[:, at, node], want, atol=1e-4, rtol=1e-3)
                target.append(given.out_loc[at * COUNT + depth])
                source.append(given.out_loc[at * COUNT + node])
            spoken.lengths[row] += len(path)
        if mask is not None:
            padding = [torch.tensor(0)] * 3  # as SGLang gives it
            spoken.cache.commit(torch.stack(target + padding), torch.stack(source + padding))
    for _ in range(2 * steps):
        tokens = {row: Token.random(draw) for row in (1, 3)}
        got, want = (worker.decode(tokens) for worker in (spoken, plain))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_a_graphs_views_show_later_steps_with_other_lengths() -> None:
    """The buffers of a graph for three requests: two real ones, and one of padding in row 0."""
    draw = torch.Generator().manual_seed(4)
    graph, eager = Worker(KERNELS), Worker(REFERENCES)
    for row, count in ((1, 3), (3, 40)):
        prompt = [Token.random(draw) for _ in range(count)]
        graph.prefill(row, prompt)
        eager.prefill(row, prompt)
    held = StepInput(
        "verify",
        torch.zeros(3, dtype=torch.int64),
        (),
        torch.ones(3, dtype=torch.int64),
        torch.zeros(3 * COUNT, dtype=torch.int64),
        drafts=Drafts(COUNT, torch.full((3 * COUNT,), -1, dtype=torch.int32)),
    )
    graph.cache.begin(held)  # the capture: nobody's rows, and a mask of ones
    for shape in ("tree", "bush"):
        parents, tokens = PARENTS[shape], [Token.random(draw) for _ in range(2 * COUNT)]
        drafts = Drafts(COUNT, masks_of(parents).repeat(2))
        given, plain = (worker.verify((1, 3), drafts) for worker in (graph, eager))
        held.rows[:2], held.seq_lens[:2] = given.rows, given.seq_lens
        held.out_loc[: 2 * COUNT] = given.out_loc
        padded = Drafts(COUNT, masks_of(parents).repeat(3))
        graph.cache.refill(replace(held, out_loc=given.out_loc, drafts=padded))
        got = graph.run([*tokens, *tokens[:COUNT]])
        eager.cache.begin(plain)
        torch.testing.assert_close(got[:, : 2 * COUNT], eager.run(tokens), atol=1e-4, rtol=1e-3)
        for worker, step in ((graph, given), (eager, plain)):
            worker.cache.commit(step.out_loc[[0, 1, 4]], step.out_loc[[0, 2, 4]])
            worker.lengths = {1: worker.lengths[1] + 2, 3: worker.lengths[3] + 1}


def test_the_plan_counts_the_tables_of_drafts() -> None:
    counted = cache_bytes(
        SLOT_SHAPE,
        WINDOWS,
        REFERENCES,
        num_q_heads=HEADS * GROUP,
        max_tokens=LONGEST,
        device="cpu",
    )
    assert Worker(REFERENCES).cache.report() == {"scratch": counted}


def test_a_cache_without_room_for_drafts_says_so() -> None:
    plain, two = Worker(REFERENCES, drafts=1), Worker(REFERENCES, drafts=2)
    for worker in (plain, two):
        worker.prefill(1, [Token.random(torch.Generator().manual_seed(0))])
    with pytest.raises(RuntimeError, match="no room for them"):
        plain.cache.begin(plain.verify((1,), Drafts(2)))
    with pytest.raises(ValueError, match="3 drafts of a request; the ring has room for 2"):
        two.cache.begin(two.verify((1,), Drafts(3)))
    slots = torch.tensor([1])
    with pytest.raises(RuntimeError, match="no room for them"):
        plain.cache.commit(slots, slots)
    with pytest.raises(RuntimeError, match="no tree of drafts was verified"):
        two.cache.commit(slots, slots)
