"""A cache with kernels beside one with their references, fed the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from cache_oracle import general_set
from torch import Tensor

from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.sink_blocks import PromptKey
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable


@dataclass(frozen=True)
class PairShape:
    """What both caches serve.

    Attributes:
        heads: KV heads.
        group: query heads of each.
        specs: of a row of K and of V.
        sink, recent: tokens of the windows.
        piece: tokens of a piece of a prefix.
        rows, slots, longest: requests, tokens of all, tokens of one.
        dtype, device: of the rows.
    """

    heads: int
    group: int
    specs: tuple[QuantSpec, QuantSpec]
    sink: int
    recent: int
    piece: int
    rows: int
    slots: int
    longest: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def num_q_heads(self) -> int:
        """All query heads."""
        return self.heads * self.group

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of K and of V."""
        return self.specs[0].head_dim, self.specs[1].head_dim


class Machine:
    """A cache of one layer with stores of its own."""

    def __init__(
        self,
        shape: PairShape,
        table: TransformTable,
        slot_table: Tensor,
        softmax: Softmax,
        ops: Ops,
        prefill: Prefill | None,
    ) -> None:
        self.windows = WindowStore(
            WindowShape(
                1,
                shape.rows,
                shape.heads,
                *shape.dims,
                shape.sink,
                shape.recent,
                shape.dtype,
                idle=2,
            ),
            shape.device,
        )
        for ring in (
            self.windows.ring_k,
            self.windows.ring_v,
            self.windows.sink_k,
            self.windows.sink_v,
        ):
            ring.fill_(float("nan"))  # what was never written must not be read
        self.slots = SlotStore(
            SlotShape.alike(1, shape.slots, shape.heads, *shape.specs), shape.device
        )
        pieces = shape.piece if prefill else 0
        config = CacheConfig(
            (0,), shape.num_q_heads, softmax, 3, shape.longest, pieces, shape.device
        )
        self.cache = Int2Cache(
            config,
            self.slots,
            self.windows,
            table,
            SlotTable(slot_table, ops.pack),
            ops=ops,
            prefill=prefill,
        )


class Both:
    """Two machines, one with the references and one with the kernels, fed the same steps.

    Args:
        shape: of both.
        seed: of transforms, slots and tokens.
        kernels: may be broken ones.
    """

    def __init__(
        self,
        shape: PairShape,
        prefill: Callable[[], Prefill],
        *,
        seed: int,
        softmax: Softmax,
        kernels: Ops = KERNELS,
    ) -> None:
        self.shape, self.softmax = shape, softmax
        sets = [
            general_set(role, 1, shape.heads, dim, seed=seed)
            for role, dim in zip("kv", shape.dims, strict=True)
        ]
        if softmax.cap:  # does not go with centred keys
            layers = tuple(replace(layer, mean=None) for layer in sets[0].layers)
            sets[0] = replace(sets[0], centered=False, layers=layers)
        self.table = TransformTable.build(
            *sets, range(1), kv_heads=range(shape.heads), device=shape.device
        )
        self.slots = torch.zeros(shape.rows, shape.longest, dtype=torch.int32, device=shape.device)
        given = shape, self.table, self.slots, softmax
        self.plain = Machine(*given, REFERENCES, None)
        self.kernels = Machine(*given, kernels, prefill())
        self.machines = (self.plain, self.kernels)
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
        for machine in self.machines:
            windows = machine.windows
            windows.sinks.admit([row], [PromptKey((), first, self.shape.longest)])
            windows.begin({row: prefix})
            if shared_with is not None:
                block = windows.sink_block[row]
                assert block == windows.sink_block[shared_with] != 0 == windows.sink_from[row]

    def step(self, new: dict[int, int], *, decode: bool = False) -> float:
        """One step; the largest difference of outputs."""
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
            torch.randn(total, heads, dim, generator=self.random).to(shape.device, shape.dtype)
            for heads, dim in zip(
                (shape.num_q_heads, shape.heads, shape.heads),
                (shape.dims[0], *shape.dims),
                strict=True,
            )
        ]
        step = StepInput(
            "decode" if decode else "extend",
            torch.tensor(rows, device=shape.device),
            tuple(rows),
            torch.tensor([self.lengths[row] for row in rows], device=shape.device),
            written.long(),
            *(() if decode else (tuple(prefixes), tuple(counts))),
        )
        outputs = []
        for machine in self.machines:
            machine.cache.begin(step)
            out = machine.cache.forward(0, *(x.flatten(1) for x in rows_of), self.softmax.sinks)
            outputs.append(out.view(total, shape.num_q_heads, -1))
        return outputs[0], outputs[1]

    def check_stores(self) -> None:
        """Codes and windows agree; a code may differ by one where a value lies on a tie."""
        one, other = self.machines
        assert (one.slots.codes[0] != other.slots.codes[0]).float().mean() < 0.005
        for name in ("ring_k", "sink_v"):
            mine, theirs = getattr(one.windows, name), getattr(other.windows, name)
            torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)

    def adopt_codes(self) -> float:
        """Give the kernels the codes of the references, so that what follows is compared over one
        cache; returns the share of codes that differed.

        A value on a tie may round either way, and one code of a token with much weight moves an
        output by a tenth.
        """
        one, other = (machine.slots for machine in self.machines)
        own = one.codes[0] != other.codes[0]
        other.codes[0].copy_(one.codes[0])
        other.affine[0].copy_(one.affine[0])
        return float(own.float().mean())
