"""Slots that hold something else than the INT2 codes of their tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oscar_kernels import reference as read_reference
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms
from oscar_kernels.reference import DraftCommit
from oscar_zoo.runtime.dispatch import REFERENCES
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowStore

POISON = 7.0


@dataclass(frozen=True)
class ExactShape(SlotShape):
    """Size of an `ExactStore`."""

    def token_bytes(self) -> int:
        exact = 4 * (self.k.head_dim + self.v.head_dim)
        return super().token_bytes() + self.num_layers * self.num_kv_heads * exact


class ExactStore(SlotStore):
    """Float32 rows by slot, beside the codes."""

    def __init__(self, shape: SlotShape, device: str | torch.device) -> None:
        super().__init__(shape, device)
        self.exact_k, self.exact_v = (
            self.rows([dim] * shape.num_layers, torch.float32, device)
            for dim in (shape.k.head_dim, shape.v.head_dim)
        )

    def layer(self, index: int, windows: WindowStore) -> LayerCache:
        cache = super().layer(index, windows)
        parts = (getattr(cache, field.name) for field in fields(cache))
        return ExactLayer(*parts, self.exact_k[index], self.exact_v[index])

    def buffers(self) -> Iterator[Tensor]:
        yield from super().buffers()
        yield from self.exact_k
        yield from self.exact_v


@dataclass(frozen=True)
class ExactLayer(LayerCache):
    """One layer of an `ExactStore`; `[slots, H, head_dim]` float32."""

    exact_k: Tensor
    exact_v: Tensor


def _writing(then: Callable[..., None]) -> Callable[..., Tensor | None]:
    """The reference, with something more for the slots of new tokens and their rows."""

    def write(
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        transforms: Transforms,
        targets: TokenTargets,
        *,
        parts: str = "all",
        rows_out: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor | None:
        rows = rows_out or (key.new_empty(key.shape).float(), value.new_empty(value.shape).float())
        given = {"parts": parts, "rows_out": rows, **options}
        out = REFERENCES.write(key, value, cache, transforms, targets, **given)
        if parts != "windows":
            then(cache, targets.out_loc.long(), rows)
        return out

    return write


def _keep(cache: ExactLayer, slots: Tensor, rows: tuple[Tensor, Tensor]) -> None:
    cache.exact_k[slots], cache.exact_v[slots] = rows


def _poison(cache: LayerCache, slots: Tensor, _: tuple[Tensor, Tensor]) -> None:
    cache.codes[slots] = 0
    cache.affine[slots] = POISON


def reading_exact_rows(op: Callable[..., Any]) -> Callable[..., Any]:
    """A reference that reads float32 rows in place of codes."""

    def read(*args: Any, **options: Any) -> Any:
        with mock.patch.object(read_reference, "stored_rows", exact_rows):
            return op(*args, **options)

    return read


def exact_rows(cache: ExactLayer, slots: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of `kv_read.reference.stored_rows`."""
    return cache.exact_k[slots], cache.exact_v[slots]


class ExactCommit(DraftCommit):
    """The reference, and float32 rows by slot."""

    def __call__(self, **given: Any) -> None:
        super().__call__(**given)
        nodes, count = given["accepted"].view(-1, given["count"]), given["count"]
        slots = given["out_loc"].long().view(-1, count)
        request, depth = (nodes >= 0).nonzero(as_tuple=True)
        old, new = slots[request, nodes[request, depth].long()], slots[request, depth]
        for cache in self.caches:
            for rows in (cache.exact_k, cache.exact_v):
                rows[new] = rows[old]


EXACT = replace(
    REFERENCES,
    make_commit=ExactCommit,
    write=_writing(_keep),
    decode=reading_exact_rows(REFERENCES.decode),
    extend=reading_exact_rows(REFERENCES.extend),
)
POISONED = replace(REFERENCES, write=_writing(_poison))
