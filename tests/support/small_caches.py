"""INT2 caches of a few small layers: one that takes steps with drafts, and a cache with kernels
beside one with their references, fed the same steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from cache_oracle import general_set
from torch import Tensor

from oscar_kernels.cache import Drafts
from oscar_kernels.spec import PLAIN, QuantSpec
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops
from oscar_zoo.runtime.engine import CacheConfig, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.sink_blocks import PromptKey
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

SPEC = QuantSpec(32, 32, 0.9, "float16")


@dataclass(frozen=True)
class CacheShape:
    """What a worker serves."""

    heads: int = 2  # KV heads
    group: int = 2  # query heads of each
    specs: tuple[QuantSpec, QuantSpec] = (SPEC, SPEC)  # rows of K and of V
    sink: int = 4  # both: tokens of the windows
    recent: int = 8
    rows: int = 4  # requests, and the padding row
    slots: int = 200
    longest: int = 100  # tokens of a request
    piece: int = 0  # tokens of a piece of a prefix
    layers: int = 1
    drafts: int = 1  # most drafts of a request
    idle: int = 0
    ranks: int = 1
    softmax: Softmax | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def num_q_heads(self) -> int:
        return self.heads * self.group

    @property
    def dims(self) -> tuple[int, int]:
        return self.specs[0].head_dim, self.specs[1].head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers in a row of `q`, of `k` and of `v`."""
        k, v = self.dims
        return self.num_q_heads * (k + v * self.latent), self.heads * k, self.heads * v

    @property
    def latent(self) -> bool:
        return self.specs[1].bits == PLAIN

    @property
    def slot_shape(self) -> SlotShape:
        return SlotShape.alike(self.layers, self.slots, self.heads, *self.specs)

    @property
    def window_shape(self) -> WindowShape:
        return WindowShape(
            self.layers,
            self.rows,
            self.heads,
            *self.dims,
            self.sink,
            self.recent,
            self.dtype,
            idle=self.idle,
            drafts=self.drafts,
            ranks=self.ranks,
        )

    @property
    def config(self) -> CacheConfig:
        return CacheConfig(
            layer_ids=tuple(range(self.layers)),
            num_q_heads=self.num_q_heads,
            softmax=self.softmax or Softmax(self.dims[0] ** -0.5),
            max_batch=self.window_shape.max_batch,
            max_tokens=self.longest,
            piece_tokens=self.piece,
            device=self.device,
        )

    def table(self, seed: int = 2) -> TransformTable:
        roles = "v" if self.latent else "kv"
        sets = [
            general_set(role, self.layers, self.heads, dim, seed=seed)
            for role, dim in zip(roles, self.dims, strict=False)
        ]
        sets = sets * 2 if self.latent else sets  # keys and values at once
        return TransformTable.build(
            *sets, range(self.layers), kv_heads=range(self.heads), device=self.device
        )

    def slot_table(self) -> Tensor:
        return torch.zeros(self.rows, self.longest, dtype=torch.int32, device=self.device)

    def cache(
        self,
        ops: Ops,
        table: TransformTable,
        slot_table: Tensor,
        prefill: Prefill | None = None,
        *,
        unwritten: float = 0.0,
    ) -> Int2Cache:
        """A cache over its own stores. `unwritten`: in windows that nobody has written."""
        windows = WindowStore(self.window_shape, self.device)
        for store in (windows.ring_k, windows.ring_v, windows.sink_k, windows.sink_v):
            store[:, 1:] = unwritten
        slots = SlotStore(self.slot_shape, self.device)
        pack = partial(ops.pack, slot_table)
        return Int2Cache(self.config, slots, windows, table, pack, ops=ops, prefill=prefill)


@dataclass
class Token:
    """What the model computes of one token, for every layer: `[layers, heads * dim]` each."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_token(shape: CacheShape, draw: torch.Generator) -> Token:
    rows = (torch.randn(shape.layers, width, generator=draw) for width in shape.widths)
    return Token(*(x.to(shape.device, shape.dtype) for x in rows))


class Worker:
    """One cache whose requests bring tokens and drafts."""

    def __init__(self, shape: CacheShape, ops: Ops, prefill: Prefill | None = None) -> None:
        self.shape, self.slots_of = shape, shape.slot_table()
        self.cache = shape.cache(ops, shape.table(), self.slots_of, prefill, unwritten=float("nan"))
        self.lengths, self.free = dict[int, int](), list(range(shape.slots - 1, 0, -1))

    def integers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.shape.device)

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
        self.cache.begin(StepInput("extend", rows, (row,), lengths, written, (0,), (count,)))
        self.run(tokens)
        self.lengths[row] = count

    def decode(self, tokens: dict[int, Token]) -> Tensor:
        """A token of every row; its outputs."""
        written = torch.cat([self.place(row, 1) for row in tokens])
        lengths = self.integers([self.lengths[row] + 1 for row in tokens])
        self.cache.begin(
            StepInput("decode", self.integers([*tokens]), (*tokens,), lengths, written)
        )
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
        layers = range(self.shape.layers)
        return torch.stack([self.cache.forward(i, *(x[i] for x in rows)) for i in layers])


PARENTS = {"tree": (-1, 0, 0, 2), "bush": (-1, 0, 1, 0), "chain": (-1, 0, 1, 2)}
"""Of each draft: the node that it hangs below."""


def masks_of(parents: Sequence[int]) -> Tensor:
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor(seen, dtype=torch.int32)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if node else ()), node]


class Both:
    """A cache of one layer with the references and one with the kernels, fed the same steps."""

    def __init__(
        self, shape: CacheShape, prefill: Prefill, *, seed: int, kernels: Ops = KERNELS
    ) -> None:
        self.shape, self.softmax, table = shape, shape.config.softmax, shape.table(seed)
        if self.softmax.cap:  # does not go with centred keys
            table = TransformTable(tuple(replace(layer, k_mean=None) for layer in table.layers))
        self.slots, nothing = shape.slot_table(), float("nan")
        plain = replace(shape, piece=0)
        self.plain = plain.cache(REFERENCES, table, self.slots, unwritten=nothing)
        self.kernels = shape.cache(kernels, table, self.slots, prefill, unwritten=nothing)
        self.caches = (self.plain, self.kernels)
        self.random = torch.Generator().manual_seed(seed)
        order = torch.randperm(shape.slots - 1, generator=self.random).int() + 1
        self.order = order.to(shape.device)
        self.next, self.lengths = 0, [0] * shape.rows

    def begin(self, row: int, shared_with: int | None = None, prefix: int = 0) -> None:
        """A new owner, perhaps of tokens that another row has cached; it shares the first ones."""
        if shared_with is not None:
            self.slots[row, :prefix] = self.slots[shared_with, :prefix]
        self.lengths[row] = prefix
        first = (row if shared_with is None else shared_with,) * self.shape.sink
        for windows in (cache.windows for cache in self.caches):
            windows.sinks.admit([row], [PromptKey((), first, self.shape.longest)])
            windows.begin({row: prefix})
            if shared_with is not None:
                block = windows.sink_block[row]
                assert block == windows.sink_block[shared_with] != 0 == windows.sink_from[row]

    def step(self, new: dict[int, int], *, decode: bool = False) -> float:
        want, got = self.outputs(new, decode=decode)
        return float((got - want).abs().max())

    def outputs(self, new: dict[int, int], *, decode: bool = False) -> tuple[Tensor, Tensor]:
        """One step in which requests bring `new` tokens; outputs of the references and of the
        kernels, `[T, num_q_heads, v_head_dim]`."""
        rows, counts = list(new), list(new.values())
        prefixes = [self.lengths[row] for row in rows]
        total = sum(counts)
        written = self.order[self.next : self.next + total]
        self.next += total
        at = 0
        for row, prefix, count in zip(rows, prefixes, counts, strict=True):
            self.slots[row, prefix : prefix + count] = written[at : at + count]
            at += count
            self.lengths[row] += count
        shape = self.shape
        rows_of = [
            torch.randn(total, width, generator=self.random).to(shape.device, shape.dtype)
            for width in shape.widths
        ]
        if shape.latent:  # Triton's interpreter would cut bits off
            rows_of[2] = rows_of[2].bfloat16().to(shape.dtype)
        step = StepInput(
            "decode" if decode else "extend",
            torch.tensor(rows, device=shape.device),
            tuple(rows),
            torch.tensor([self.lengths[row] for row in rows], device=shape.device),
            written.long(),
            *(() if decode else (tuple(prefixes), tuple(counts))),
        )
        outputs = []
        for cache in self.caches:
            cache.begin(step)
            out = cache.forward(0, *rows_of, self.softmax.sinks)
            outputs.append(out.view(total, shape.num_q_heads, -1))
        return outputs[0], outputs[1]

    def check_stores(self) -> None:
        """Codes and windows agree; a code may differ by one where a value lies on a tie."""
        one, other = self.caches
        assert (one.caches[0].codes != other.caches[0].codes).float().mean() < 0.005
        for name in ("ring_k", "sink_v"):
            mine, theirs = getattr(one.windows, name), getattr(other.windows, name)
            torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)

    def adopt_codes(self) -> float:
        """Give the kernels the codes of the references, so that what follows is compared over one
        cache; returns the share of codes that differed.

        A value on a tie may round either way, and one code of a token with much weight moves an
        output by a tenth.
        """
        one, other = (cache.caches[0] for cache in self.caches)
        own = one.codes != other.codes
        other.codes.copy_(one.codes)
        other.affine.copy_(one.affine)
        return float(own.float().mean())
