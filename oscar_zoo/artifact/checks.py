"""Checks of one rotation file that need only its numbers.

They ask whether it is finite, invertible, ordered, and no placeholder. Every check returns a
`CheckFinding`, which people read, or a `Problem`, the reason why the file must not be used. Limits
are measured: a float64 fit stored as float32 stays below 6e-8, a float32 fit below 1.1e-6, and a
matrix that went through bf16 is at 1e-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.artifact.hadamard import hadamard
from oscar_zoo.artifact.outcome import Grade, State

FP64_LIMIT = 2e-7
FP32_LIMIT = 5e-6
CONDITION_LIMIT = 1e3
EIGENVALUE_NOISE = 1e-6
SAME_MATRIX = 1e-4
LOCALISATION = {"k": 2.0, "v": 1.15}
"""Least score that real calibrated files show; random matrices reach 1.0."""

LOCALISATION_MIN_DIM = 64

_NO_EIGENVECTORS = ("hadamard", "pbr", "h_pbr")
"""Objective or composition -> matrices that do not depend on data, so all layers are equal."""


@dataclass(frozen=True)
class CheckFinding:
    """The result of a check that passed; `warnings` are stable codes."""

    detail: str
    state: State = "ok"
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Why a check failed; fields as in `outcome.Rejected`."""

    code: str
    message: str
    path: str | None = None
    layer: int | None = None
    head: int | None = None
    measured: float | None = None
    limit: float | None = None

    def at(self, path: str) -> Problem:
        """This problem, for the file `path`."""
        return replace(self, path=path)


def data_free(rotations: RotationSet) -> bool:
    """Whether the declared objective makes the same matrix for every layer."""
    return (rotations.composition or rotations.objective) in _NO_EIGENVECTORS


def numeric(rotations: RotationSet) -> tuple[CheckFinding, Grade] | Problem:
    """All values finite, and forward @ partner.T = I in float64, largest absolute deviation.

    At most 2e-7 is the precision of a float64 fit, at most 5e-6 that of a float32 fit (a warning),
    above is refused. Entries of a pair of inverses are larger than those of a rotation, and so is
    what rounding them makes: the first limit is in units of `_rounding_unit`.
    """
    worst = rounding = condition = 0.0
    for layer in _distinct(rotations):
        if not all(np.isfinite(array).all() for array in _arrays(layer)):
            return Problem(
                "not_finite",
                f"layer {layer.layer_id} has NaN or infinite values",
                layer=layer.layer_id,
            )
        errors = _inverse_error(layer)
        if errors.max() > FP32_LIMIT:
            return _not_inverse(rotations, layer, errors)
        worst = max(worst, float(errors.max()))
        rounding = max(rounding, float((errors / _rounding_unit(layer)).max()))
        if not rotations.orthogonal:
            condition = max(
                condition,
                float((_spectral_norm(layer.forward) * _spectral_norm(layer.partner)).max()),
            )
    formula = "R R^T" if rotations.orthogonal else "R Q^T"
    detail = f"max |{formula} - I| = {worst:.1e}" + (
        f", condition {condition:.0f}" if condition else ""
    )
    warnings = (("numeric.fp32_grade",) if rounding > FP64_LIMIT else ()) + (
        ("numeric.condition",) if condition > CONDITION_LIMIT else ()
    )
    grade: Grade = "fp32" if rounding > FP64_LIMIT else "fp64"
    return CheckFinding(detail, "warning" if warnings else "ok", warnings), grade


def eigenvalues(rotations: RotationSet) -> CheckFinding | Problem:
    """Eigenvalues must ascend and end positive, with at most noise below zero.

    In Hadamard files, and only there, they are all 1.
    """
    if rotations.layers[0].eigenvalues is None:
        return CheckFinding("no eigenvalues in this file", "warning", ("eigenvalues.missing",))
    ones = rotations.objective == "hadamard"
    smallest, ties = np.inf, 0
    for layer in rotations.layers:
        values = np.asarray(layer.eigenvalues, dtype=np.float64)
        place = f"the eigenvalues of layer {layer.layer_id}"
        last = values[..., -1]
        if ones != bool((values == 1).all()):
            said = (
                "are not all 1, as in a Hadamard file"
                if ones
                else "are all 1, as in a Hadamard file only"
            )
            return Problem("eigenvalues.all_ones", f"{place} {said}", layer=layer.layer_id)
        if (np.diff(values, axis=-1) < 0).any():
            return Problem("eigenvalues.order", f"{place} are not ascending", layer=layer.layer_id)
        if not (last > 0).all() or (values[..., 0] < -EIGENVALUE_NOISE * last).any():
            low = float(values[..., 0].min())
            return Problem(
                "eigenvalues.sign", f"{place} are negative", layer=layer.layer_id, measured=low
            )
        smallest = min(smallest, float((values[..., 0] / last).min()))
        ties += int((np.diff(values, axis=-1) == 0).sum())
    if ones:
        return CheckFinding("all 1, as declared")
    detail = f"ascending, smallest over largest {smallest:.1e}"
    return (
        CheckFinding(f"{detail}, {ties} tied", "warning", ("eigenvalues.tied",))
        if ties
        else CheckFinding(detail)
    )


def content(rotations: RotationSet) -> CheckFinding | Problem:
    """Matrices must be what the objective says.

    An identity, a permutation, a plain Hadamard matrix or a repeated layer in disguise is refused.
    """
    h = hadamard(rotations.head_dim)
    declared = rotations.composition or rotations.objective
    seen: dict[bytes, int] = {}
    for layer in _distinct(rotations):
        place = f"the matrix of layer {layer.layer_id}"
        largest, length = np.abs(layer.forward).max(axis=-1), np.linalg.norm(layer.forward, axis=-1)
        if (
            (np.abs(layer.forward - np.eye(rotations.head_dim)) < SAME_MATRIX)
            .all(axis=(-2, -1))
            .any()
        ):
            return Problem("content.identity", f"{place} is the identity", layer=layer.layer_id)
        unit = (largest > 1 - SAME_MATRIX) & (length < 1 + SAME_MATRIX)
        if declared != "pbr" and unit.all(axis=-1).any():
            return Problem(
                "content.permutation", f"{place} only permutes channels", layer=layer.layer_id
            )
        plain = (np.abs(layer.forward - h) < SAME_MATRIX).all(axis=(-2, -1))
        if declared == "hadamard" and not plain.all():
            return Problem(
                "content.not_hadamard", f"{place} is not the Hadamard matrix", layer=layer.layer_id
            )
        if declared != "hadamard" and plain.any():
            return Problem(
                "content.hadamard", f"{place} is the plain Hadamard matrix", layer=layer.layer_id
            )
        twin = seen.setdefault(sha256(layer.forward.tobytes()).digest(), layer.layer_id)
        if twin != layer.layer_id and not data_free(rotations):
            return Problem(
                "content.equal_layers",
                f"{place} repeats that of layer {twin}",
                layer=layer.layer_id,
            )
    if rotations.objective == "uresidual":
        return CheckFinding(
            "a uresidual file: published transposed, see its method",
            "warning",
            ("content.uresidual",),
        )
    return CheckFinding(
        "the same matrix in every layer, as declared"
        if data_free(rotations)
        else "every layer differs"
    )


def localisation_score(rotations: RotationSet) -> float | None:
    """Mean over layers of s = d/3 * mean over columns of sum(W^4), with W = R H.

    `None` when the score means nothing for this set.

    Keys score above 2, values above 1.15 in real files; a random rotation scores 1. A hint, never a
    reason to refuse.
    """
    applies = rotations.orthogonal and rotations.composition in ("r_h", "r_h_pbr")
    if not applies or rotations.head_dim < LOCALISATION_MIN_DIM:
        return None
    h = hadamard(rotations.head_dim)
    # the mean over columns of a sum over d rows, times d/3; x ** 4 would call pow for every element
    fourth = [np.square(np.square(layer.forward @ h)).mean() for layer in rotations.layers]
    return float(np.mean(fourth)) * rotations.head_dim**2 / 3


def localisation(sides: dict[str, RotationSet]) -> CheckFinding:
    """Compare the scores of K and V with what real files show; warnings only."""
    scores = {
        role: score
        for role, side in sides.items()
        if (score := localisation_score(side)) is not None
    }
    if not scores:
        return CheckFinding(
            "not checked: only for calibrated rotations of 64 channels and more", "not checked"
        )
    warnings = [
        f"localisation.{role}" for role, score in scores.items() if score < LOCALISATION[role]
    ]
    if len(scores) == 2 and scores["k"] <= scores["v"]:
        warnings.append("localisation.order")
    detail = ", ".join(f"{role.upper()} {score:.2f}" for role, score in scores.items())
    return CheckFinding(
        f"score {detail}; random is 1.0", "warning" if warnings else "ok", tuple(warnings)
    )


def _distinct(rotations: RotationSet) -> Iterator[LayerTransform]:
    """The layers, without those whose arrays are the same objects as those of an earlier layer.

    A shared record is thus checked once.
    """
    seen: set[tuple[int, ...]] = set()
    for layer in rotations.layers:
        identity = tuple(map(id, _arrays(layer)))
        if identity not in seen:
            seen.add(identity)
            yield layer


def _arrays(layer: LayerTransform) -> tuple[NDArray[np.float32], ...]:
    """Every array of a layer, whatever its format holds."""
    return tuple(value for value in vars(layer).values() if isinstance(value, np.ndarray))


def _inverse_error(layer: LayerTransform) -> NDArray[np.float64]:
    """max |forward @ partner.T - I| per head, float64; a scalar array for layer-wise matrices."""
    forward = layer.forward.astype(np.float64)
    partner = forward if layer.partner is layer.forward else layer.partner.astype(np.float64)
    product = forward @ np.swapaxes(partner, -2, -1) - np.eye(forward.shape[-1])
    return np.asarray(np.abs(product).max(axis=(-2, -1)))


def _rounding_unit(layer: LayerTransform) -> NDArray[np.float64]:
    """Per head, the largest 2 sqrt(sum_k r_ik^2 q_jk^2), at least 1.

    Roundings of single terms add up like noise.

    In this unit honest float32 copies of WUSH pairs are at 5e-8, as rotations are, for any
    condition measured.
    """
    if layer.partner is layer.forward:
        return np.ones(layer.forward.shape[:-2])
    squares = np.square(layer.forward, dtype=np.float64) @ np.swapaxes(
        np.square(layer.partner, dtype=np.float64), -2, -1
    )
    return np.asarray(2 * np.sqrt(squares.max(axis=(-2, -1)))).clip(1)


def _not_inverse(
    rotations: RotationSet, layer: LayerTransform, errors: NDArray[np.float64]
) -> Problem:
    measured = float(errors.max())
    word = "is not orthogonal" if rotations.orthogonal else "and its partner are not inverse"
    return Problem(
        "not_orthogonal" if rotations.orthogonal else "not_inverse",
        f"the matrix of layer {layer.layer_id} {word}: {measured:.1e}, limit {FP32_LIMIT:.0e}",
        layer=layer.layer_id,
        head=int(errors.argmax()) if errors.ndim else None,
        measured=measured,
        limit=FP32_LIMIT,
    )


def _spectral_norm(matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """Largest singular value per matrix, at most 8 % too large.

    It comes from the Frobenius norm of the 32nd power of the Gram matrix.
    """
    gram = matrix.astype(np.float64)
    gram = np.swapaxes(gram, -2, -1) @ gram
    exponent, log_norm = 1, np.zeros(gram.shape[:-2])
    for _ in range(6):
        norm = np.maximum(np.linalg.norm(gram, axis=(-2, -1)), np.finfo(np.float64).tiny)
        log_norm = log_norm + np.log(norm) / exponent
        gram = gram / norm[..., None, None]
        gram, exponent = gram @ gram, exponent * 2
    return np.asarray(np.exp(log_norm / 2))
