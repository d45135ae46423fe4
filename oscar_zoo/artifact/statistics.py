"""The statistics fingerprint `oscar-zoo.stats/1`: enough numbers to recognise a covariance later.

For every target matrix C of a fit it keeps the trace, the diagonal and two products C w with sign
vectors w derived from the model, the matrix and the place. A rotation file with eigenvalues implies
its own C, and a WUSH file the two matrices that it was made from. The fingerprint tells whether
they are the ones that were measured. That catches transposed, shifted, swapped or foreign matrices,
which are all perfectly orthogonal. It does not catch a publisher who forges both.

Errors are relative L2 norms. A diagonal entry far below the largest one is known to float32 only
relative to that largest one, so an elementwise bound would refuse honest files of models with
outlier channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact import tensor_file
from oscar_zoo.artifact.formats import (
    HESSIANS,
    LayerTransform,
    Role,
    RotationSet,
    hadamard,
    pbr_permutation,
)
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.errors import MalformedFile, UsageError

Matrix = NDArray[np.float64]

LIMIT = 1e-5
"""Largest relative error of an honest file; measured ones are below 1e-7, the mildest mistake seen
is 0.07."""

MATRICES: tuple[str, ...] = get_args(StatisticName)
TARGETS: Mapping[str, str] = MappingProxyType(
    {"ktk": "kk", "qqt": "qq", "vtv": "vv", "sst": "sst", "oo": "oo"}
)
"""Hessian of an objective -> name of its matrix."""

_SKETCHES = 2
_PARTS = ("trace", "diag", "sketch")
_FACTORS: Mapping[str, str] = MappingProxyType(
    {
        "plain": "U",
        "br": "UP",
        "r_h": "UH",
        "r_h_pbr": "UHP",
        "br_h128": "UPH",
        "h_r_pbr": "HUP",
        "h_pbr_r": "HPU",
    }
)
"""Composition -> its factors from left to right, where the eigenvectors U are one of them."""


WUSH_MATRICES: Mapping[Role, tuple[str, str]] = MappingProxyType(
    {"k": ("kk", "qq"), "v": ("vv", "wo")}
)
"""Side -> names of M and of the matrix that Hs is a multiple of."""


@dataclass(frozen=True)
class FingerprintMatch:
    """Worst relative errors of a rotation set against a fingerprint, and where the worst of all is.

    Attributes:
        matrix: name of the target matrix.
        trace: of the trace.
        diag: L2, of the diagonal.
        sketch: L2, of the products with sign vectors.
        layer: layer id of the worst error.
        head: KV head of the worst error, `None` for layer-wise matrices.
    """

    matrix: str
    trace: float
    diag: float
    sketch: float
    layer: int
    head: int | None

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.trace, self.diag, self.sketch)


def probe_signs(
    model_id: str,
    revision: str | None,
    matrix: str,
    layer: int,
    head: int | None,
    index: int,
    d: int,
) -> NDArray[np.float64]:
    """The sign vector w: `[d]` float64 of +1 and -1.

    Bits of sha256(s + counter), counter 0, 1, .. as 4 big-endian bytes, most significant bit first,
    1 -> +1; s is the sha256 of the text
    `oscar-zoo/v1|<model>|<revision>|<matrix>|<layer>|<head>|<index>`, `-` for what is unknown.
    """
    place = f"{revision or '-'}|{matrix}|{layer}|{'-' if head is None else head}|{index}"
    seed = hashlib.sha256(f"oscar-zoo/v1|{model_id}|{place}".encode()).digest()
    blocks = (
        hashlib.sha256(seed + counter.to_bytes(4, "big")).digest()
        for counter in range(-(-d // 256))
    )
    bits = np.unpackbits(np.frombuffer(b"".join(blocks), dtype=np.uint8))[:d]
    return bits.astype(np.float64) * 2 - 1


def sign_vectors(
    model_id: str,
    revision: str | None,
    name: str,
    place: tuple[Sequence[int], tuple[int, ...]],
    d: int,
) -> Matrix:
    """All sign vectors of one matrix: `[layers, (heads,) 2, d]`."""
    layer_ids, heads = place
    rows = [
        probe_signs(model_id, revision, name, layer, head, index, d)
        for layer in layer_ids
        for head in (range(heads[0]) if heads else (None,))
        for index in range(_SKETCHES)
    ]
    return np.array(rows, dtype=np.float64).reshape(len(layer_ids), *heads, _SKETCHES, d)


def fingerprint_bytes(
    matrices: Mapping[str, Matrix], layer_ids: Sequence[int], model_id: str, revision: str | None
) -> bytes:
    """The fingerprint file of undamped, symmetric matrices: name -> `[L, d, d]` or `[L,
    num_kv_heads, d, d]` float64, of the `L` decoder layers `layer_ids`."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, stack in matrices.items():
        shape = stack.shape
        if (
            name not in MATRICES
            or len(shape) not in (3, 4)
            or shape[0] != len(layer_ids)
            or shape[-1] != shape[-2]
        ):
            raise UsageError(
                f"no fingerprint of a matrix {name!r} of shape {list(shape)}, {len(layer_ids)}"
                " layers."
            )
        signs = sign_vectors(model_id, revision, name, (layer_ids, shape[1:-2]), shape[-1])
        tensors[f"{name}.trace"] = np.trace(stack, axis1=-2, axis2=-1).astype(np.float32)
        tensors[f"{name}.diag"] = np.diagonal(stack, axis1=-2, axis2=-1).astype(np.float32)
        tensors[f"{name}.sketch"] = np.asarray(signs @ np.swapaxes(stack, -2, -1), dtype=np.float32)
    return tensor_file.write(tensors)


def read_fingerprint(
    data: bytes, *, what: str = "the statistics"
) -> dict[str, NDArray[np.float32]]:
    """Parse an untrusted fingerprint file: `<matrix>.trace`, `.diag`, `.sketch`, float32."""
    tensors = tensor_file.read(data, what=what)
    for key, value in tensors.items():
        name, _, part = key.partition(".")
        if name not in MATRICES or part not in _PARTS:
            raise MalformedFile("stats.name", f"{what}: unknown entry {key[:60]!r}.")
        if not np.isfinite(value).all():
            raise MalformedFile("stats.values", f"{what}: {key} has a value that is not finite.")
    for name in {key.partition(".")[0] for key in tensors}:
        if any(f"{name}.{part}" not in tensors for part in _PARTS):
            raise MalformedFile("stats.name", f"{what}: {name} needs trace, diag and sketch.")
        trace, diag, sketch = (tensors[f"{name}.{part}"].shape for part in _PARTS)
        if (
            len(trace) not in (1, 2)
            or diag[:-1] != trace
            or sketch != (*trace, _SKETCHES, diag[-1])
        ):
            raise MalformedFile("stats.shape", f"{what}: the shapes of {name} do not go together.")
    return tensors


def target_matrix(objective: str) -> str | None:
    """Name of the matrix a file with this objective implies, or `None` when it implies none."""
    hessian, _, composition = objective.partition("_")
    return TARGETS[hessian] if hessian in HESSIANS and composition in _FACTORS else None


def compare(
    rotations: RotationSet,
    fingerprint: Mapping[str, NDArray[np.float32]],
    model_id: str,
    revision: str | None,
) -> FingerprintMatch | None:
    """Compare every layer and head with the fingerprint: the worst relative errors, infinite when
    the shapes differ, or `None` when nothing can be compared: no eigenvalues, an objective without
    a target, or a fingerprint without that matrix."""
    name = target_matrix(rotations.objective)
    if (
        name is None
        or f"{name}.trace" not in fingerprint
        or rotations.layers[0].eigenvalues is None
    ):
        return None
    stored = [np.asarray(fingerprint[f"{name}.{part}"], dtype=np.float64) for part in _PARTS]
    heads = rotations.layers[0].forward.shape[:-2]
    if stored[1].shape != (len(rotations.layers), *heads, rotations.head_dim):
        return FingerprintMatch(name, np.inf, np.inf, np.inf, rotations.layers[0].layer_id, None)
    place = rotations.layer_ids, heads
    signs = sign_vectors(model_id, revision, name, place, rotations.head_dim)
    errors = [
        _errors(layer, rotations.objective, [part[at] for part in stored], signs[at])
        for at, layer in enumerate(rotations.layers)
    ]
    return _match(name, rotations.layer_ids, np.stack(errors))


def _errors(
    layer: LayerTransform, objective: str, stored: Sequence[Matrix], signs: Matrix
) -> Matrix:
    """Relative errors of trace, diagonal and sketch, `[(heads,) 3]`. Ties allow several orders of
    eigenvectors, and the best of them counts."""
    options = [_errors_of(basis, layer, stored, signs) for basis in _bases(layer, objective)]
    return np.asarray(np.min(options, axis=0))


def _errors_of(
    basis: Matrix, layer: LayerTransform, stored: Sequence[Matrix], signs: Matrix
) -> Matrix:
    values = np.asarray(layer.eigenvalues, dtype=np.float64)
    diag = (basis**2 @ values[..., None])[..., 0]
    sketch = ((signs @ basis) * values[..., None, :]) @ np.swapaxes(basis, -2, -1)
    return _relative_errors(diag, sketch, stored)


def _relative_errors(diag: Matrix, sketch: Matrix, stored: Sequence[Matrix]) -> Matrix:
    """Of trace, diagonal and sketch, `[.., 3]`."""
    errors = (
        relative(diag.sum(axis=-1)[..., None], stored[0][..., None]),
        relative(diag, stored[1]),
        relative(sketch, stored[2]).max(axis=-1),
    )
    return np.stack(errors, axis=-1)


def _match(name: str, layer_ids: tuple[int, ...], errors: Matrix) -> FingerprintMatch:
    """The largest of the errors `[layers, (heads,) 3]`, and where the largest of all is."""
    trace, diag, sketch = map(float, errors.reshape(-1, 3).max(axis=0))
    place = np.unravel_index(errors.max(axis=-1).argmax(), errors.shape[:-1])
    head = int(place[1]) if len(place) > 1 else None
    return FingerprintMatch(name, trace, diag, sketch, layer_ids[int(place[0])], head)


def relative(value: Matrix, reference: Matrix) -> Matrix:
    """L2 norm of the difference over the L2 norm of the reference, along the last axis."""
    scale = np.maximum(np.linalg.norm(reference, axis=-1), np.finfo(np.float32).tiny)
    return np.asarray(np.linalg.norm(value - reference, axis=-1) / scale)


def _bases(layer: LayerTransform, objective: str) -> Iterator[Matrix]:
    """U of `forward` for ascending eigenvalues, and where some are equal, of the stable order of
    ties too. Eigenvalues that differ in float64 may be equal in the file, so the ascending order
    comes first."""
    factors = _FACTORS.get(objective.partition("_")[2])
    if factors is None or layer.eigenvalues is None:
        return
    d = layer.forward.shape[-1]
    if objective.endswith("_br_h128") and d != 128:
        return
    ascending = pbr_permutation(np.arange(d, dtype=np.float64))
    yield _undo(
        layer.forward.astype(np.float64),
        factors,
        np.broadcast_to(ascending, layer.eigenvalues.shape),
    )
    if "P" in factors and (np.diff(layer.eigenvalues, axis=-1) == 0).any():
        stable = np.apply_along_axis(pbr_permutation, -1, layer.eigenvalues)
        yield _undo(layer.forward.astype(np.float64), factors, stable)


def _undo(matrix: Matrix, factors: str, permutation: NDArray[np.int64]) -> Matrix:
    """Strip every factor but U from both ends of `matrix`."""
    h = hadamard(matrix.shape[-1])
    inverse = np.argsort(permutation, axis=-1)
    before, after = factors.split("U")
    for factor in before:
        # P^T X moves row j to row permutation[j]
        matrix = (
            h @ matrix
            if factor == "H"
            else np.take_along_axis(matrix, permutation[..., None], axis=-2)
        )
    for factor in reversed(after):
        matrix = (
            matrix @ h
            if factor == "H"
            else np.take_along_axis(matrix, inverse[..., None, :], axis=-1)
        )
    return matrix


@dataclass(frozen=True)
class _Formula:
    """How a transform was damped and ordered, and that Hs is `scale` times the recorded matrix."""

    gamma: float
    diagonal: bool
    descending: bool
    scale: float


def compare_wush(
    rotations: RotationSet, fingerprint: Mapping[str, NDArray[np.float32]], manifest: Manifest
) -> list[FingerprintMatch] | None:
    """Compare every layer and head of a WUSH file, one side, with the fingerprint. With E = H
    diag(lambda)^(1/2) H, lambda in the order in which eigenvectors met the rows of H, and c^2 = (1
    + gamma) tr M / tr lambda^(1/2), a layer implies both matrices it was made from: M = c^2 Q E Q^T
    from the partner Q and Hs = c^-2 R E R^T from the forward matrix R, each with the damping that
    the manifest records and that is undone here, because the fingerprint is of undamped matrices.
    Source: WUSH-KV, section 4, solved for its inputs.

    Gives the worst relative errors for M and for Hs, infinite when shapes differ or a trace is not
    positive; `None` when nothing can be compared: no WUSH file per head, a manifest without its
    damping, or a fingerprint without its matrices.
    """
    formula = _formula(rotations, manifest)
    role = rotations.declared_role
    if (
        formula is None
        or role is None
        or any(f"{name}.trace" not in fingerprint for name in WUSH_MATRICES[role])
    ):
        return None
    shape = (len(rotations.layers), *rotations.layers[0].forward.shape[:-1])
    names = WUSH_MATRICES[role]
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
    identity, place = (
        (manifest.model.id, manifest.model.revision),
        (rotations.layer_ids, shape[1:2]),
    )
    found = []
    for which, name in enumerate(names):
        signs = sign_vectors(*identity, name, place, rotations.head_dim)
        matrices = np.stack([pair[which] for pair in implied])
        stored = [fingerprint[f"{name}.{part}"].astype(np.float64) for part in _PARTS]
        diagonals = np.diagonal(matrices, axis1=-2, axis2=-1)
        errors = _relative_errors(diagonals, signs @ matrices, stored)
        found.append(_match(name, rotations.layer_ids, errors))
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
