"""Second moments of all layers of a model.

Sums of disjoint token sets add (`merge`). `coverage.check` must pass before a fit: a head that was
never observed still gives a file that looks valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.layer_moments import LayerMoments
from oscar_zoo.errors import ComputeFailed


@dataclass(frozen=True)
class Moments:
    """The sums of all layers of one model, or of a part of it.

    Attributes:
        geometry: of the whole model; says which layers and heads there must be.
        layers: by decoder layer index; empty when a method needs no data.
    """

    geometry: Geometry
    layers: Mapping[int, LayerMoments]

    @classmethod
    def zeros(
        cls,
        geometry: Geometry,
        device: torch.device | str = "cpu",
        *,
        heads: Sequence[int] | None = None,
    ) -> Self:
        """Empty sums for every layer of `geometry`.

        `heads` are the model's indices of some KV heads; `None` stands for all.
        """
        shape = (
            geometry.num_kv_heads if heads is None else len(heads),
            geometry.head_dim,
            geometry.v_head_dim,
        )
        layers = {
            layer: LayerMoments.zeros(*shape, device=device, heads=heads)
            for layer in geometry.attention_layers
        }
        return cls(geometry, layers)

    @property
    def tokens(self) -> int:
        """Tokens every layer saw, once `coverage.check` passed; 0 without layers."""
        return min((layer.tokens for layer in self.layers.values()), default=0)

    def merge(self, other: Moments) -> None:
        """Add a disjoint token set of the same layers and heads; see `LayerMoments.merge`."""
        if self.geometry != other.geometry or self.layers.keys() != other.layers.keys():
            raise ComputeFailed(
                "moments of different layers do not add.", hint="use parts of one model"
            )
        for layer_id, layer in self.layers.items():
            layer.merge(other.layers[layer_id])
