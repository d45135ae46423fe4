"""The transforms of one worker as tensors: always (forward, partner, mean), for keys and for
values.

Row vectors: `k' = (k - mean) @ forward`, `q' = q @ partner`, `v' = v @ forward`,
`o = o' @ partner.T`. Masters stay float32, because a bfloat16 copy of a rotation misses
orthogonality by 2e-3. A side that is orthogonal fills both fields with one tensor, so no caller can
forget the partner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oscar_zoo.artifact.formats import Array, LayerTransform, RotationSet
from oscar_zoo.errors import GeometryMismatch, VerificationFailed

IDENTITY_LIMIT = 1e-5
"""Largest |forward @ partner.T - I| in float64 (RUNTIME section 3)."""


@dataclass(frozen=True)
class Pair:
    """One side of one layer, float32, for the KV heads of this worker.

    Attributes:
        forward: `[num_kv_heads | 1, d, d]`; one matrix broadcasts over all heads.
        partner: same shape; the same tensor when orthogonal.
        mean: `[num_kv_heads | 1, d]` or `None`.
    """

    forward: Tensor
    partner: Tensor
    mean: Tensor | None

    def cached(self, x: Tensor) -> Tensor:
        """What the cache holds: `(x - mean) @ forward`; `x` `[tokens, num_kv_heads, d]`, result
        float32."""
        x = x.float()
        if self.mean is not None:
            x = x - self.mean
        return _per_head(x, self.forward)

    def query(self, q: Tensor) -> Tensor:
        """`q @ partner`; `q` `[tokens, num_q_heads, d]`, result float32."""
        return _per_group(q.float(), self.partner)

    def output(self, o: Tensor) -> Tensor:
        """`o @ partner.T`: back to the domain of the model; `o` `[tokens, num_q_heads, d]`
        float32."""
        return _per_group(o, self.partner.transpose(-1, -2))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The distinct tensors."""
        distinct = [self.forward] if self.partner is self.forward else [self.forward, self.partner]
        return (*distinct, *([] if self.mean is None else [self.mean]))


@dataclass(frozen=True)
class TransformTable:
    """Transforms of the layers `start_layer`, `start_layer + 1`, ... of one worker, by local layer
    index."""

    k: tuple[Pair, ...]
    v: tuple[Pair, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for pair in (*self.k, *self.v) for t in pair.tensors)

    @classmethod
    def build(
        cls,
        k: RotationSet,
        v: RotationSet,
        layer_ids: range,
        *,
        kv_heads: range,
        device: str | torch.device,
    ) -> TransformTable:
        """Slice the artifact for one worker and check every pair.

        Args:
            k, v: both sides of one artifact.
            layer_ids: global ids of the decoder layers of this worker.
            kv_heads: global ids of its KV heads; tensor parallelism cuts per-head tensors along
                these.
            device: where the tensors live.

        Raises:
            GeometryMismatch: a layer or head is missing.
            VerificationFailed: `forward @ partner.T` is not the identity.
        """
        return cls(
            *(
                tuple(_side(side, name, layer_ids, kv_heads, device))
                for side, name in ((k, "K"), (v, "V"))
            )
        )

    def with_partner_as_forward(self) -> TransformTable:
        """The deliberate bug of loading a general pair as if it were a rotation."""
        return TransformTable(
            *(tuple(Pair(p.forward, p.forward, p.mean) for p in side) for side in (self.k, self.v))
        )


def transform_bytes(k: RotationSet, v: RotationSet, num_layers: int, num_kv_heads: int) -> int:
    """Bytes of the table of a worker with `num_layers` layers and `num_kv_heads` heads, before it
    is built."""
    total = 0
    for side in (k, v):
        d, heads = side.head_dim, 1 if side.grouping == "layer" else num_kv_heads
        per_head = d * d * (1 if side.orthogonal else 2) + (d if side.centered else 0)
        total += 4 * num_layers * heads * per_head
    return total


def _side(
    side: RotationSet, name: str, layer_ids: range, kv_heads: range, device: str | torch.device
) -> list[Pair]:
    by_id = {layer.layer_id: layer for layer in side.layers}
    missing = [i for i in layer_ids if i not in by_id]
    if missing:
        raise GeometryMismatch(
            f"the {name} side of the artifact has no layer {missing[0]} (of {len(by_id)} layers)."
        )
    if side.num_kv_heads is not None and kv_heads.stop > side.num_kv_heads:
        raise GeometryMismatch(
            f"the {name} side has {side.num_kv_heads} KV heads, this worker needs head"
            f" {kv_heads.stop - 1}."
        )
    for i in layer_ids:
        _check_identity(by_id[i], name)
    return [_pair(by_id[i], side.grouping == "kv_head", kv_heads, device) for i in layer_ids]


def _check_identity(layer: LayerTransform, name: str) -> None:
    forward, partner = layer.forward.astype(np.float64), layer.partner.astype(np.float64)
    error = float(np.abs(forward @ np.swapaxes(partner, -1, -2) - np.eye(forward.shape[-1])).max())
    if not error <= IDENTITY_LIMIT:
        raise VerificationFailed(
            f"{name} layer {layer.layer_id}: forward and partner are no pair, they miss the"
            f" identity by {error:.1e}.",
            hint="oscar-zoo verify DIR",
        )


def _pair(
    layer: LayerTransform, per_head: bool, kv_heads: range, device: str | torch.device
) -> Pair:
    def tensor(array: Array) -> Tensor:
        own = array[kv_heads.start : kv_heads.stop] if per_head else array[None]
        return torch.from_numpy(np.ascontiguousarray(own, dtype=np.float32)).to(device)

    forward = tensor(layer.forward)
    partner = forward if layer.partner is layer.forward else tensor(layer.partner)
    return Pair(forward, partner, None if layer.mean is None else tensor(layer.mean))


def _per_head(x: Tensor, matrix: Tensor) -> Tensor:
    if matrix.shape[0] == 1:
        return x @ matrix[0]
    return torch.einsum("thd,hde->the", x, matrix)


def _per_group(x: Tensor, matrix: Tensor) -> Tensor:
    """As `_per_head` for query heads, of which consecutive ones share a KV head."""
    if matrix.shape[0] == 1:
        return x @ matrix[0]
    return torch.einsum("thgd,hde->thge", x.unflatten(1, (matrix.shape[0], -1)), matrix).flatten(
        1, 2
    )
