"""The cached tokens of one attention layer, stored as a server stores them
(`oscar_kernels.cache`): codes of every token, with exact rows of the first and last ones beside
them. So any number of tokens can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oscar_kernels.cache import BatchView, Transforms, WindowState, allocate
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.transformers.steps import SPARE, Steps
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops

GROWTH = 512
"""Tokens by which the store of codes grows. It is copied then, a layer at a time; spare room of an
eighth of it would take away a tenth of what is saved."""
LATE = 32
"""Tokens whose codes are written at once in plain torch, where they take as long as those of one;
until then they are read from the window."""
EXACT = {torch.float16: torch.bfloat16}
"""Type of the windows, where it is not the model's; kernels have no other 16 bits."""
F = TypeVar("F", bound=Callable[..., Any])
in_place: Callable[[F], F] = torch.inference_mode()
"""For what changes the store: a prefill under `inference_mode` must not forbid that a later
`generate` goes on."""


def ops_of(device: torch.device) -> Ops:
    """The kernels on NVIDIA GPUs, and elsewhere their definition in plain torch."""
    return KERNELS if device.type == "cuda" and torch.version.hip is None else REFERENCES


@dataclass(frozen=True)
class LayerSpec:
    """What never changes of a layer. Copies of a cache share it."""

    transforms: Transforms
    k: QuantSpec
    v: QuantSpec
    windows: Windows

    def __deepcopy__(self, memo: Any) -> LayerSpec:
        return self

    def on(self, device: torch.device) -> LayerSpec:
        moved: dict[int, Tensor] = {}  # the partner of an orthogonal matrix is that matrix
        own = (getattr(self.transforms, field.name) for field in fields(Transforms))
        tensors = (x if x is None else moved.setdefault(id(x), x.to(device)) for x in own)
        return replace(self, transforms=Transforms(*tensors))


class Rows:
    """The tokens of a batch in one layer.

    Attributes:
        length: tokens of each sequence, padding included.
        ring_from: the first token whose exact row is in the ring.
        coded: tokens that have codes.
        windows: which positions have exact rows.
    """

    def __init__(self, spec: LayerSpec, steps: Steps, key: Tensor) -> None:
        """`key`: `[B, num_kv_heads, T, head_dim]`, the first one; for its device and type."""
        self.device, self.ops = key.device, ops_of(key.device)
        self.spec, self.steps = spec.on(self.device), steps
        self.length = self.ring_from = self.coded = 0
        batch, heads = key.shape[:2]
        windows = spec.windows
        self.store = allocate(
            spec.k, spec.v, slots=0, rows=batch, num_kv_heads=heads, sink=windows.sink,
            recent=windows.recent, ring_rows=windows.recent + SPARE,
            dtype=EXACT.get(key.dtype, key.dtype), device=self.device,
        )  # fmt: skip
        blocks = torch.arange(batch, dtype=torch.int32, device=self.device)
        self.windows = WindowState(blocks, torch.zeros_like(blocks), torch.zeros_like(blocks))
        self._late: list[Tensor] = []
        """Keys and values without codes, as they came."""

    @property
    def batch(self) -> int:
        return len(self.windows.sink_block)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.store.stores, *self._late))

    @in_place
    def write(self, key: Tensor, value: Tensor, query: Tensor | None = None) -> Tensor | None:
        """Append tokens, `[B, heads, T, channels]`; returns the transformed query, `[T * B,
        num_q_heads, head_dim]`, token by token."""
        first, new = self.length, key.shape[2]
        end, recent, late = first + new, self.store.recent, self.ops is not KERNELS
        self._reserve(end)
        self.count(end)
        flat = [x.permute(2, 0, 1, 3).flatten(0, 1) for x in (key, value)]
        if query is not None:
            query = query.permute(2, 0, 1, 3).flatten(0, 1)
        turned = self._write(flat, first, parts="windows" if late else "all", query=query)
        if not late:
            return turned
        pairs = zip(self._late, flat, strict=True) if self._late else ()
        self._late = [torch.cat(pair) for pair in pairs] or flat
        if end - self.coded > LATE or self.coded <= end - recent:  # `read` may count one more
            self._write(self._late, self.coded, parts="slots")
            self._late, self.coded = [], end
        return turned

    def count(self, length: int) -> None:
        """There are `length` tokens of each sequence, written here or by a graph."""
        self.length = length
        self.ring_from = max(self.ring_from, length - self.store.ring_rows)
        if self.ops is KERNELS:
            self.coded = length

    @property
    def room(self) -> int:
        """Tokens of each sequence that can come before the stores grow."""
        return len(self.store.codes) // self.batch - self.length

    def _write(
        self, rows: list[Tensor], first: int, *, parts: str, query: Tensor | None = None
    ) -> Tensor | None:
        key, value = (x.contiguous() for x in rows)
        new = len(key) // self.batch
        out = None if query is None else query.new_empty(query.shape, dtype=self.ops.rows_dtype)
        return self.ops.write(
            key, value, self.store, self.spec.transforms,
            self.steps.targets(first, new, self.device), windows=self.windows, parts=parts,
            query=query, query_out=out,
        )  # fmt: skip

    def _reserve(self, tokens: int) -> None:
        lacks = tokens - self.length - self.room
        if lacks <= 0:
            return
        more = max(lacks, GROWTH) * self.batch

        def grown(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(more, *x.shape[1:])])

        codes, affine = grown(self.store.codes), grown(self.store.affine)
        self.store = replace(self.store, codes=codes, affine=affine)

    def view(self, window_from: int | None = None) -> BatchView:
        """All tokens; from `window_from` on they are read from the ring, if it has them."""
        windows = self.windows
        if window_from is not None:
            start = self.steps.start(max(window_from, self.ring_from), self.device)
            windows = replace(windows, ring_start=start)
        return BatchView(*self.steps.lists(self.length, self.device), windows)

    @in_place
    def read(self, reader: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows of all tokens in the basis of the model, `[B, num_kv_heads, n, channels]`, as a
        sequence of `reader` tokens reads them."""
        lengths, t = self.steps.lengths(self.length), self.spec.transforms
        k, v = (
            torch.empty(
                sum(lengths), self.store.num_kv_heads, x.head_dim, dtype=dtype, device=self.device
            )
            for x in (self.spec.k, self.spec.v)
        )
        self.ops.materialize(self.store, self.view(reader - self.store.recent), out_k=k, out_v=v)

        def restored(x: Tensor, partner: Tensor, mean: Tensor | None = None) -> Tensor:
            padded = pad_sequence(x.split(lengths), True, padding_side="left").transpose(1, 2)
            own = padded.float() @ partner.mT
            return (own if mean is None else own + mean[:, None]).to(dtype)

        return restored(k, t.q_partner, t.k_mean), restored(v, t.o_partner)

    @in_place
    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.length = length = max(0, length)
        kept = max(0, length - self.coded) * self.batch
        self._late = [x[:kept] for x in self._late] if kept else []
        self.coded = min(self.coded, length)
        self.ring_from = min(self.ring_from, length)
        start = self.steps.start(self.ring_from, self.device)
        self.windows = replace(self.windows, ring_start=start)

    @in_place
    def select(self, indices: Tensor) -> None:
        """The sequences of the batch are `indices` of those before; `steps` knows it already."""
        index = indices.to(self.device)

        def by_token(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, self.batch))[:, index].flatten(0, 1)

        s = self.store
        self.store = replace(
            s, codes=by_token(s.codes), affine=by_token(s.affine), ring_k=s.ring_k[index],
            ring_v=s.ring_v[index], sink_k=s.sink_k[index], sink_v=s.sink_v[index],
        )  # fmt: skip
        self._late = [by_token(x) for x in self._late]
        blocks = torch.arange(len(index), dtype=torch.int32, device=self.device)
        start = self.steps.start(self.ring_from, self.device)
        self.windows = WindowState(blocks, torch.zeros_like(blocks), start)
