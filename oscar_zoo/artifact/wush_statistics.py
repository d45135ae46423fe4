"""The fingerprint check of WUSH files: both companion matrices must come from the moments.

With E = H diag(lambda)^(1/2) H, lambda in the order in which eigenvectors met the rows of H
(ascending, or descending where the manifest says so), and c^2 = (1 + gamma) tr M / tr lambda^(1/2),
a layer implies both matrices it was made from: M = c^2 Q E Q^T from the partner Q and Hs = c^-2 R E
R^T from the forward matrix R, each with the damping that the manifest records and that is undone
here, because the fingerprint is of undamped matrices.

Source: WUSH-KV: KV Cache Quantization with Data-Adaptive Transforms, section 4, solved for its
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, Role, RotationSet
from oscar_zoo.artifact.hadamard import hadamard
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.statistics import FingerprintMatch, Matrix, relative, sign_vectors

MATRICES: Mapping[Role, tuple[str, str]] = MappingProxyType({"k": ("kk", "qq"), "v": ("vv", "wo")})
"""Side -> names of M and of the matrix that Hs is a multiple of."""


@dataclass(frozen=True)
class _Formula:
    """How a transform was damped and ordered, and that Hs is `scale` times the recorded matrix."""

    gamma: float
    diagonal: bool
    descending: bool
    scale: float


def compare(
    rotations: RotationSet, fingerprint: Mapping[str, NDArray[np.float32]], manifest: Manifest
) -> list[FingerprintMatch] | None:
    """Compare every layer and head of one side with the fingerprint.

    Returns:
        Worst relative errors for M and for Hs, infinite when shapes differ or a trace is not
        positive; `None` when nothing can be compared: no WUSH file per head, a manifest without its
        damping, or a fingerprint without its matrices.
    """
    formula = _formula(rotations, manifest)
    role = rotations.declared_role
    if (
        formula is None
        or role is None
        or any(f"{name}.trace" not in fingerprint for name in MATRICES[role])
    ):
        return None
    shape = (len(rotations.layers), *rotations.layers[0].forward.shape[:-1])
    names = MATRICES[role]
    traces = fingerprint[f"{names[0]}.trace"].astype(np.float64)
    if any(fingerprint[f"{name}.diag"].shape != shape for name in names) or not (traces > 0).all():
        return [
            FingerprintMatch(name, np.inf, np.inf, np.inf, rotations.layers[0].layer_id, None)
            for name in names
        ]
    implied = [
        _implied(layer, trace, formula)
        for layer, trace in zip(rotations.layers, traces, strict=True)
    ]
    found = []
    for which, name in enumerate(names):
        signs = sign_vectors(
            manifest.model.id,
            manifest.model.revision,
            name,
            (rotations.layer_ids, shape[1:2]),
            rotations.head_dim,
        )
        matrices = np.stack([pair[which] for pair in implied])
        stored = {
            part: fingerprint[f"{name}.{part}"].astype(np.float64)
            for part in ("trace", "diag", "sketch")
        }
        diagonals = np.diagonal(matrices, axis1=-2, axis2=-1)
        errors = np.stack(
            [
                relative(diagonals.sum(-1)[..., None], stored["trace"][..., None]),
                relative(diagonals, stored["diag"]),
                relative(signs @ matrices, stored["sketch"]).max(-1),
            ]
        )
        found.append(_worst(name, rotations.layer_ids, errors))
    return found


def _formula(rotations: RotationSet, manifest: Manifest) -> _Formula | None:
    role, estimators = rotations.declared_role, manifest.fit.estimator
    if (
        role is None
        or estimators is None
        or rotations.transform != "wush"
        or rotations.layers[0].eigenvalues is None
    ):
        return None
    estimator = estimators.k if role == "k" else estimators.v
    gamma, damping = estimator.params.get("gamma"), estimator.params.get("damping")
    usual = (
        estimator.id == f"wush-{role}/1"
        and rotations.grouping == "kv_head"
        and not rotations.centered
    )
    if not usual or type(gamma) not in (int, float) or not 0 <= float(gamma or 0) <= 1:
        return None
    if damping not in ("identity", "diagonal"):
        return None
    group = manifest.model.num_q_heads // manifest.model.num_kv_heads
    descending = (
        manifest.fit.composition is not None
        and manifest.fit.composition.permutation == "descending"
    )
    return _Formula(
        float(gamma or 0), damping == "diagonal", descending, 2.0 * group if role == "k" else 2.0
    )


def _implied(layer: LayerTransform, trace: Matrix, formula: _Formula) -> tuple[Matrix, Matrix]:
    """M and the matrix behind Hs of every head of a layer, undamped; `trace` is that of M."""
    roots = np.sqrt(np.asarray(layer.eigenvalues, dtype=np.float64).clip(0))
    h = hadamard(roots.shape[-1])
    ordered = roots[..., ::-1] if formula.descending else roots
    middle = (h * ordered[..., None, :]) @ h
    c2 = (
        (1 + formula.gamma) * trace / roots.sum(-1)
    )  # the last eigenvalue is positive in every file that gets here
    found = []
    for matrix, scale in ((layer.partner, c2), (layer.forward, 1 / (c2 * formula.scale))):
        exact = matrix.astype(np.float64)
        found.append(
            _undamped(
                scale[..., None, None] * (exact @ middle @ np.swapaxes(exact, -2, -1)), formula
            )
        )
    return found[0], found[1]


def _undamped(matrix: Matrix, formula: _Formula) -> Matrix:
    """C of C + gamma tr(C)/d I, or of C + gamma diag(C)."""
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    share = formula.gamma / (1 + formula.gamma)
    added = share * (diagonal if formula.diagonal else diagonal.mean(-1, keepdims=True))
    return np.asarray(matrix - added[..., None] * np.eye(matrix.shape[-1]))


def _worst(name: str, layer_ids: tuple[int, ...], errors: Matrix) -> FingerprintMatch:
    """The largest of the errors `[3, layers, heads]` of trace, diagonal and sketch."""
    trace, diagonal, sketch = (float(error) for error in errors.max(axis=(1, 2)))
    position, head = np.unravel_index(errors.max(axis=0).argmax(), errors.shape[1:])
    return FingerprintMatch(name, trace, diagonal, sketch, layer_ids[int(position)], int(head))
