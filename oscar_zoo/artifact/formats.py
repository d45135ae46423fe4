"""Rotation sets: the typed content of one rotation file, for format_version 1, 2 and 3.

Every layer is always a triple `(forward, partner, mean)`, so no caller can apply a non-orthogonal
transform as if it were a rotation. Row vectors, matrices act from the right:

* keys:   `k' = (k - mean) @ forward`, queries `q' = q @ partner`, and `forward @ partner.T = I`;
* values: `v' = v @ forward`, outputs `o = o' @ partner.T`, and `forward @ partner.T = I`.

An orthogonal layer has `partner is forward`. Layer ids are decoder layer indices of the whole
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.specs import Geometry, brief
from oscar_zoo.errors import GeometryMismatch

Array = NDArray[np.float32]
Role = Literal["k", "v"]
Grouping = Literal["layer", "kv_head"]
CalibrationValue = str | int | float | bool | None

HESSIANS: Mapping[str, Role] = MappingProxyType(
    {"ktk": "k", "qqt": "k", "vtv": "v", "sst": "v", "oo": "v"}
)
"""Objective prefix -> the role it belongs to."""

COMPOSITIONS = ("plain", "pbr", "br", "br_h128", "r_h", "h_pbr", "h_r_pbr", "h_pbr_r", "r_h_pbr")


@dataclass(frozen=True)
class LayerTransform:
    """The transform of one layer.

    Attributes:
        layer_id: decoder layer index.
        forward: `[d, d]`, or `[num_kv_heads, d, d]` when the set is grouped by KV head; float32.
        partner: same shape; the inverse transpose of `forward`. The same object when orthogonal.
        mean: `[d]` or `[num_kv_heads, d]` float32, subtracted from keys; `None` when not centered.
        eigenvalues: `[d]` or `[num_kv_heads, d]` float32 ascending; `None` when the file has none.
    """

    layer_id: int
    forward: Array
    partner: Array
    mean: Array | None = None
    eigenvalues: Array | None = None


@dataclass(frozen=True)
class RotationSet:
    """All layers of one side (K or V) of an artifact, in ascending layer order.

    Attributes:
        format_version: 1 (shared by all heads, orthogonal), 2 (per KV head, orthogonal), 3 (either,
            with partners).
        objective: for format 1 `<hessian>_<composition>`, `hadamard` or `uresidual`.
        grouping: `layer` (one matrix for all heads) or `kv_head`.
        transform: name of the transform, such as `oscar`, `hadamard`, `wush`.
        orthogonal: `partner is forward` in every layer.
        centered: every layer has a `mean`.
        layers: ascending by `layer_id`.
        calibration: the optional block of the file, scalars only.
        role: the side a format 3 file names in its transform block; `None` for formats 1 and 2.
    """

    format_version: int
    objective: str
    grouping: Grouping
    transform: str
    orthogonal: bool
    centered: bool
    layers: tuple[LayerTransform, ...]
    calibration: Mapping[str, CalibrationValue] = field(default_factory=dict)
    role: Role | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder layer indices, ascending."""
        return tuple(layer.layer_id for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """d: width of the rows these transforms act on."""
        return int(self.layers[0].forward.shape[-1])

    @property
    def num_kv_heads(self) -> int | None:
        """Heads of the leading axis, or `None` when all heads share one matrix."""
        return int(self.layers[0].forward.shape[0]) if self.grouping == "kv_head" else None

    @property
    def declared_role(self) -> Role | None:
        """The side that the file claims, or `None` when it claims none.

        An objective `qqt_*` claims K and `sst_*` claims V; format 3 names the side.
        """
        if self.role is not None:
            return self.role
        head = self.objective.split("_", 1)[0]
        if head in HESSIANS:
            return HESSIANS[head]
        if self.objective.endswith("_k"):
            return "k"
        return "v" if self.objective.endswith("_v") else None

    @property
    def composition(self) -> str | None:
        """The composition part of a format-1 objective, or `None`."""
        head, _, tail = self.objective.partition("_")
        return tail if head in HESSIANS and tail in COMPOSITIONS else None

    @property
    def requires(self) -> tuple[str, ...]:
        """Capabilities an engine must declare to apply this set, sorted."""
        needs = set()
        if self.grouping == "kv_head":
            needs.add("per_head")
        if self.centered:
            needs.add("k_mean")
        if not self.orthogonal:
            needs.add("k_partner" if self.declared_role == "k" else "v_partner")
        return tuple(sorted(needs))

    def require_geometry(self, role: Role, geometry: Geometry, model_name: str) -> None:
        """Refuse to be used with another shape of model."""
        width = geometry.head_dim if role == "k" else geometry.v_head_dim
        made_for: dict[str, int | tuple[int, ...] | None]
        made_for = {
            "head_dim": self.head_dim,
            "layers": self.layer_ids,
            "KV heads": self.num_kv_heads,
        }
        has: dict[str, int | tuple[int, ...]]
        has = {
            "head_dim": width,
            "layers": geometry.attention_layers,
            "KV heads": geometry.num_kv_heads,
        }
        for what, mine in made_for.items():
            if mine is not None and mine != has[what]:
                raise GeometryMismatch(
                    f"this {role.upper()} rotation is for {what} {brief(mine)}; {model_name} has"
                    f" {brief(has[what])}.",
                    hint=f"artifacts that fit: oscar-zoo list --for {model_name}",
                )
