"""A cache with kernels beside one with their references, fed the same steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_caches import CacheShape
from torch import Tensor

from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.sink_blocks import PromptKey
from oscar_zoo.runtime.transforms import TransformTable


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
