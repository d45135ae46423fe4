"""Rotation sets: the typed content of one rotation file, for format_version 1, 2 and 3.

Every layer is always a triple `(forward, partner, mean)`, so no caller can apply a non-orthogonal
transform as if it were a rotation. Row vectors, matrices act from the right:

* keys:   `k' = (k - mean) @ forward`, queries `q' = q @ partner`, and `forward @ partner.T = I`;
* values: `v' = v @ forward`, outputs `o = o' @ partner.T`, and `forward @ partner.T = I`.

An orthogonal layer has `partner is forward`. Layer ids are decoder layer indices of the whole
model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.specs import Geometry, brief
from oscar_zoo.errors import GeometryMismatch, UsageError

Array = NDArray[np.float32]
Role = Literal["k", "v"]
Grouping = Literal["layer", "kv_head"]
CalibrationValue = str | int | float | bool | None

HESSIANS: Mapping[str, Role] = {"ktk": "k", "qqt": "k", "vtv": "v", "sst": "v", "oo": "v"}
"""Objective prefix -> the role it belongs to."""

COMPOSITIONS = ("plain", "pbr", "br", "br_h128", "r_h", "h_pbr", "h_r_pbr", "h_pbr_r", "r_h_pbr")


@dataclass(frozen=True)
class LayerTransform:
    """The transform of one layer, float32. `forward` is `[d, d]`, or `[num_kv_heads, d, d]` when
    grouped by KV head; `partner` its inverse transpose, the same object when orthogonal; `mean` is
    subtracted from keys, `[d]` or `[num_kv_heads, d]`, and `eigenvalues` ascend, of the same
    shape. `feedback` is how the rounding of a channel of a key makes up for the channels before it:
    `[num_kv_heads, d (d - 1) / 2]`, the part above the diagonal, row by row, of what
    `oscar_kernels.quantizer` takes; `None` rounds to nearest."""

    layer_id: int
    forward: Array
    partner: Array
    mean: Array | None = None
    eigenvalues: Array | None = None
    feedback: Array | None = None

    @property
    def feedback_matrix(self) -> NDArray[np.float16] | None:
        """`[num_kv_heads, d, d]`, zero on and below the diagonal."""
        if self.feedback is None:
            return None
        d = self.forward.shape[-1]
        matrix = np.zeros((len(self.feedback), d, d), dtype=np.float16)
        matrix[:, *np.triu_indices(d, 1)] = self.feedback
        return matrix


@dataclass(frozen=True)
class RotationSet:
    """All layers of one side (K or V) of an artifact, ascending. `role` is what format 3 says;
    `objective` is `<hessian>_<composition>`, `hadamard` or `uresidual` in format 1."""

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
        return tuple(layer.layer_id for layer in self.layers)

    @property
    def head_dim(self) -> int:
        return int(self.layers[0].forward.shape[-1])

    @property
    def num_kv_heads(self) -> int | None:
        """Heads of the leading axis, or `None` when all heads share one matrix."""
        return int(self.layers[0].forward.shape[0]) if self.grouping == "kv_head" else None

    @property
    def declared_role(self) -> Role | None:
        """The side that the file claims, by its objective in formats 1 and 2."""
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
        if self.layers[0].feedback is not None:
            needs.add("k_feedback")
        return tuple(sorted(needs))

    def require_geometry(self, role: Role, geometry: Geometry, model_name: str) -> None:
        width = geometry.head_dim if role == "k" else geometry.v_head_dim
        facts: tuple[tuple[str, int | tuple[int, ...] | None, int | tuple[int, ...]], ...] = (
            ("head_dim" if role == "k" else "head_dim of values", self.head_dim, width),
            ("layers", self.layer_ids, geometry.attention_layers),
            ("KV heads", self.num_kv_heads, geometry.num_kv_heads),
        )
        for what, mine, has in facts:
            if mine is not None and mine != has:
                mine_is = f"this rotation is for {what} {brief(mine)}"
                hint = f"artifacts that fit, if any: oscar-zoo list --for {model_name}"
                raise GeometryMismatch(f"{mine_is}; {model_name} has {brief(has)}.", hint=hint)


def has_hadamard(d: int) -> bool:
    """Whether `hadamard(d)` is known here: powers of two, and many multiples of 8; up to 256 all
    but 88, 136, 176, 184 and 232."""
    return d > 0 and (_odd(d) == 1 or (d % 8 == 0 and _root(2 * _odd(d) - 1) is not None))


def _require_hadamard(d: int) -> None:
    if not has_hadamard(d):
        raise UsageError(f"no Hadamard matrix for head_dim {d} is known here.")


@lru_cache(maxsize=16)
def hadamard(d: int) -> NDArray[np.float64]:
    """A Hadamard matrix divided by sqrt(d), `[d, d]` float64, symmetric and orthogonal, whose first
    row is constant; read-only, because it is cached. Sylvester's for a power of two, and his times
    Paley's second construction for another width."""
    _require_hadamard(d)
    odd = _odd(d)
    h: NDArray[np.float64] = np.ones((1, 1)) if odd == 1 else _paley(2 * odd - 1)
    while h.shape[0] < d:
        h = np.block([[h, h], [h, -h]])
    h = np.asarray(h / np.sqrt(d), dtype=np.float64)
    h.setflags(write=False)
    return h


def _odd(d: int) -> int:
    return d // (d & -d)


def _root(q: int) -> int | None:
    """The prime of which `q` is the first or the second power; `None` where there is none."""
    for prime in (q, math.isqrt(q)):
        if prime in (q, q / prime) and all(prime % n for n in range(2, math.isqrt(prime) + 1)):
            return prime
    return None


def _paley(q: int) -> NDArray[np.float64]:
    """Paley's symmetric Hadamard matrix of order `2 (q + 1)`; `q` is 1 modulo 4."""
    size = q + 1
    conference = np.zeros((size, size))
    conference[0, 1:] = conference[1:, 0] = 1
    conference[1:, 1:] = _squares(q)
    h = np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(size), [[1, -1], [-1, -1]])
    return np.asarray(h * h[0] * h[0, :, None], dtype=np.float64)  # makes the first row constant


def _squares(q: int) -> NDArray[np.float64]:
    """`[q, q]`: 1 where the difference of two elements of the field with `q` elements is a square,
    -1 where it is not, and 0 on the diagonal.

    Of a field with `p * p` elements, `a + b sqrt(n)` is a square where its norm `a^2 - n b^2` is
    one in the field with `p` elements, for any `n` that is not.
    """
    p = _root(q) or q
    squares = {x * x % p for x in range(1, p)}
    sign = np.array([0] + [1 if x in squares else -1 for x in range(1, p)])
    if p == q:
        element = np.arange(q)
        return np.asarray(sign[(element[:, None] - element) % p], dtype=np.float64)
    no_square = min(set(range(2, p)) - squares)
    a, b = np.divmod(np.arange(q), p)
    norm = (a[:, None] - a) ** 2 - no_square * (b[:, None] - b) ** 2
    return np.asarray(sign[norm % p], dtype=np.float64)


def bit_reversal(d: int) -> NDArray[np.int64]:
    """`br[i]`: `i` with its log2(d) bits in reverse order; `[d]` int64. Where `d` is no power of
    two, the lowest bits are reversed, as many as `d` has factors of two, and the rest of `i`
    follows."""
    _require_hadamard(d)
    odd = _odd(d)
    bits = (d // odd).bit_length() - 1
    low = [int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return np.array([low[i % len(low)] * odd + i // len(low) for i in range(d)], dtype=np.int64)


def pbr_permutation(eigenvalues: NDArray[np.floating]) -> NDArray[np.int64]:
    """The column order of P for `[d]` eigenvalues in any order: `X @ P` is `X[:, perm]`, and
    `perm[br(i)]` is the index of the i-th largest. For ascending ones it is `perm[j] = d - 1 -
    br(j)`."""
    order = np.argsort(-np.asarray(eigenvalues, dtype=np.float64), kind="stable")
    perm = np.empty_like(order)
    perm[bit_reversal(len(order))] = order
    return perm


def hadamard_name(geometry: Geometry) -> str:
    widths = geometry.head_dim, geometry.v_head_dim
    return "sylvester" if all(_odd(width) == 1 for width in widths) else "paley"


def hadamard_set(geometry: Geometry, role: Role) -> RotationSet:
    """The data-free baseline. Eigenvalues are all 1, because no covariance stands behind the
    matrix."""
    d = geometry.head_dim if role == "k" else geometry.v_head_dim
    matrix, ones = hadamard(d).astype(np.float32), np.ones(d, dtype=np.float32)
    layers = tuple(
        LayerTransform(i, matrix, matrix, eigenvalues=ones) for i in geometry.attention_layers
    )
    return RotationSet(1, "hadamard", "layer", "hadamard", True, False, layers)
