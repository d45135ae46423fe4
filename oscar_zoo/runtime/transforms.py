"""The transforms of one worker as tensors, as `oscar_kernels.cache.Transforms` defines them.

Matrices stay float32, because a bfloat16 copy of a rotation misses orthogonality by 2e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_kernels.cache import Transforms
from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.errors import GeometryMismatch, VerificationFailed

IDENTITY_LIMIT = 1e-5
"""Largest |forward @ partner.T - I| in float64."""

_Side: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Forward, partner, mean and feedback of K or of V."""


@dataclass(frozen=True)
class TransformTable:
    """Transforms of the attention layers of one worker, by local layer index; the feedback is
    float16, all else float32."""

    # What the ops take. Where a pair is orthogonal, both of its fields are one tensor, so no caller
    # can forget the partner.
    layers: tuple[Transforms, ...]

    @property
    def nbytes(self) -> int:
        tensors = (tensor for layer in self.layers for tensor in vars(layer).values())
        return sum({id(x): x.nbytes for x in tensors if x is not None}.values())

    @property
    def centred(self) -> bool:
        """Whether cached keys lack their mean, which shifts the logits of a query."""
        return any(layer.k_mean is not None for layer in self.layers)

    @classmethod
    def build(
        cls,
        k: RotationSet,
        v: RotationSet,
        layer_ids: Sequence[int],
        *,
        kv_heads: range,
        device: str | torch.device,
    ) -> TransformTable:
        """Slice the artifact for one worker and check every pair. `layer_ids` and `kv_heads` are
        the global ids of its full-attention layers, in the order of the table, and of its KV heads,
        along which tensor parallelism cuts per-head tensors. Latents, keys and values at once, have
        the same set for both."""
        keys = _side(k, "K", layer_ids, kv_heads, device)
        values = keys if v is k else _side(v, "V", layer_ids, kv_heads, device)
        if any(mean is not None for _, _, mean, _ in values) or (k is v and k.centered):
            raise ValueError(
                "values with a mean are not served: the weights of a softmax add up to 1 only over"
                " all tiers"
            )
        return cls(
            tuple(
                Transforms(k_forward, q_partner, v_forward, o_partner, k_mean, feedback)
                for (k_forward, q_partner, k_mean, feedback), (v_forward, o_partner, *_) in zip(
                    keys, values, strict=True
                )
            )
        )


def transform_bytes(k: RotationSet, v: RotationSet, num_layers: int, num_kv_heads: int) -> int:
    total = 0
    for side in (k,) if v is k else (k, v):
        d, heads = side.head_dim, 1 if side.grouping == "layer" else num_kv_heads
        per_head = d * d * (1 if side.orthogonal else 2) + (d if side.centered else 0)
        total += 4 * num_layers * heads * per_head
        total += 2 * num_layers * heads * d * d if "k_feedback" in side.requires else 0
    return total


def _side(
    side: RotationSet,
    name: str,
    layer_ids: Sequence[int],
    kv_heads: range,
    device: str | torch.device,
) -> list[_Side]:
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
) -> _Side:
    def tensor(array: NDArray[np.floating]) -> Tensor:
        own = array[kv_heads.start : kv_heads.stop] if per_head else array[None]
        return torch.from_numpy(np.array(own)).to(device)  # a copy, because files are read-only

    forward = tensor(layer.forward)
    partner = forward if layer.partner is layer.forward else tensor(layer.partner)
    more = (layer.mean, layer.feedback_matrix)
    mean, feedback = (None if one is None else tensor(one) for one in more)
    return forward, partner, mean, feedback
