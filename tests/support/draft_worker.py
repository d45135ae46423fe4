"""One worker whose requests bring drafts: prompts, decode steps, and steps with drafts, in slots
that lie anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from cache_oracle import general_set
from torch import Tensor

from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

LAYERS, ROWS, SLOTS = 2, 4, 1200


@dataclass(frozen=True)
class DraftShape:
    """What a worker serves.

    Attributes:
        heads, group, dim: KV heads, query heads of each, channels.
        sink, recent: tokens of the windows.
        count: most drafts of a request.
        longest: tokens of a request.
        dtype, device: of the rows.
    """

    heads: int = 2
    group: int = 2
    dim: int = 32
    sink: int = 6
    recent: int = 8
    count: int = 4
    longest: int = 100
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def spec(self) -> QuantSpec:
        """Of a row of keys or of values."""
        return QuantSpec(self.dim, self.dim, 0.9, "float16")

    @property
    def slots(self) -> SlotShape:
        """Of the slots."""
        return SlotShape.alike(LAYERS, SLOTS, self.heads, self.spec, self.spec)

    @property
    def windows(self) -> WindowShape:
        """Of the windows."""
        sizes = LAYERS, ROWS, self.heads, self.dim, self.dim, self.sink, self.recent
        return WindowShape(*sizes, self.dtype, drafts=self.count)

    @property
    def config(self) -> CacheConfig:
        """Of the cache."""
        softmax = Softmax(self.dim**-0.5)
        num_q_heads = self.heads * self.group
        return CacheConfig((0, 1), num_q_heads, softmax, ROWS, self.longest, 0, self.device)

    def random(self, draw: torch.Generator) -> Token:
        """A token."""
        heads = (self.heads * self.group, self.heads, self.heads)
        rows = (torch.randn(LAYERS, n * self.dim, generator=draw) for n in heads)
        return Token(*(x.to(self.device, self.dtype) for x in rows))


@dataclass
class Token:
    """What the model computes of one token, for every layer: `[layers, heads * dim]` each."""

    q: Tensor
    k: Tensor
    v: Tensor


class Worker:
    """One cache.

    Args:
        shape: of it.
        ops: of its device.
        prefill: where the ops need one.
    """

    def __init__(self, shape: DraftShape, ops: Ops, prefill: Prefill | None = None) -> None:
        device = shape.device
        self.slots_of = torch.zeros(ROWS, shape.longest, dtype=torch.int32, device=device)
        windows = WindowStore(shape.windows, device)
        for store in (windows.ring_k, windows.ring_v, windows.sink_k, windows.sink_v):
            store.fill_(float("nan"))  # what was never written must not be read
            store[:, 0] = 0  # but the dummies are
        sets = [general_set(role, LAYERS, shape.heads, shape.dim, seed=2) for role in ("k", "v")]
        heads = range(shape.heads)
        table = TransformTable.build(*sets, range(LAYERS), kv_heads=heads, device=device)
        source = SlotTable(self.slots_of, ops.pack)
        stores = SlotStore(shape.slots, device), windows
        config = replace(shape.config, piece_tokens=64 if prefill else 0)
        self.cache = Int2Cache(config, *stores, table, source, ops=ops, prefill=prefill)
        self.device = device
        self.lengths, self.free = dict[int, int](), list(range(SLOTS - 1, 0, -1))

    def integers(self, numbers: Sequence[int]) -> Tensor:
        """On the device, as engines have them."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def place(self, row: int, new: int) -> Tensor:
        """Slots of the next tokens of a row; drafts keep theirs for the next step."""
        at, own = self.lengths[row], self.slots_of[row]
        for position in range(at, at + new):
            if not own[position]:
                own[position] = self.free.pop()
        return own[at : at + new].long()

    def prefill(self, row: int, tokens: Sequence[Token]) -> None:
        """A new owner of a row begins with a prompt."""
        self.lengths[row] = 0
        written, count = self.place(row, len(tokens)), len(tokens)
        self.cache.windows.hand_out([row])
        rows, lengths = self.integers([row]), self.integers([count])
        step = StepInput("extend", rows, (row,), lengths, written, (0,), (count,))
        self.cache.begin(step)
        self.run(tokens)
        self.lengths[row] = count

    def decode(self, tokens: dict[int, Token]) -> Tensor:
        """A token of every row; its outputs."""
        written = torch.cat([self.place(row, 1) for row in tokens])
        rows = self.integers([*tokens])
        lengths = self.integers([self.lengths[row] + 1 for row in tokens])
        self.cache.begin(StepInput("decode", rows, (*tokens,), lengths, written))
        for row in tokens:
            self.lengths[row] += 1
        return self.run([*tokens.values()])

    def verify(self, rows: Sequence[int], drafts: Drafts) -> StepInput:
        """A step with drafts of every row, which is not begun."""
        written = torch.cat([self.place(row, drafts.count) for row in rows])
        lengths = self.integers([self.lengths[row] for row in rows])
        return StepInput("verify", self.integers(rows), (), lengths, written, drafts=drafts)

    def run(self, tokens: Sequence[Token]) -> Tensor:
        """Outputs of all layers, `[layers, tokens, ...]`."""
        rows = [torch.stack([getattr(one, name) for one in tokens], 1) for name in "qkv"]
        return torch.stack([self.cache.forward(i, *(x[i] for x in rows)) for i in range(LAYERS)])


PARENTS = {"tree": (-1, 0, 0, 2), "bush": (-1, 0, 1, 0), "chain": (-1, 0, 1, 2)}
"""Of each draft: the node that it hangs below."""


def masks_of(parents: Sequence[int]) -> Tensor:
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor(seen, dtype=torch.int32)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if node else ()), node]
