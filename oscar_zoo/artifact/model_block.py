"""The part of a manifest about the base model: identity, geometry and weights."""

from __future__ import annotations

from typing import Literal

from oscar_zoo.artifact.specs import Geometry, Hex40, Hex64, ModelId, Rope, Spec, Text


class CompatibleModel(Spec):
    """Another checkpoint the artifact may be served with, and on what evidence."""

    id: ModelId
    revision: Hex40 | None = None
    evidence: Literal["measured", "claimed"]
    score_ref: Text | None = None


class WeightsInfo(Spec):
    """How the base model's weights are stored."""

    dtype: Text
    quantization: Text | None = None


class ModelBlock(Geometry):
    """The base model: identity, geometry, and what decides folding."""

    id: ModelId
    revision: Hex40 | None
    config_sha256: Hex64 | None
    kv_share: dict[str, int] | None = None
    rope: Rope | None
    qk_norm: bool | None
    output_gate: bool | None
    weights: WeightsInfo | None
    compatible_with: tuple[CompatibleModel, ...]

    @property
    def geometry(self) -> Geometry:
        """Only the shape."""
        return Geometry(**{name: getattr(self, name) for name in Geometry.model_fields})
