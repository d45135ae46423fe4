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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact import tensor_file
from oscar_zoo.artifact.formats import LayerTransform, Role, RotationSet, hadamard, pbr_permutation
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.errors import MalformedFile, UsageError

Matrix = NDArray[np.float64]

LIMIT = 1e-5
"""Largest relative error of an honest file; measured ones are below 1e-7, the mildest mistake seen
is 0.07."""

MATRICES: tuple[str, ...] = get_args(StatisticName)
TARGETS = {"ktk": "kk", "qqt": "qq", "vtv": "vv", "sst": "sst", "oo": "oo"}
"""Hessian of an objective -> name of its matrix."""

_SKETCHES = 2
_PARTS = ("trace", "diag", "sketch")
_FACTORS = {
    "plain": "U", "br": "UP", "r_h": "UH", "r_h_pbr": "UHP", "br_h128": "UPH", "h_r_pbr": "HUP",
    "h_pbr_r": "HPU",
}  # fmt: skip
"""Composition -> its factors from left to right, where the eigenvectors U are one of them."""
WUSH_MATRICES: Mapping[Role, tuple[str, str]] = {"k": ("kk", "qq"), "v": ("vv", "wo")}
"""Side -> names of M and of the matrix that Hs is a multiple of."""


WUSH_NOTHING, WUSH_EMPTY = 1e-10, 1e-4
"""Shares of the mean diagonal entry: WUSH counts a channel with less than the first as empty, and
damps it by the second."""


@dataclass(frozen=True)
class FingerprintMatch:
    """How far the target `matrix` that a rotation set implies is from the recorded one: the worst
    relative errors of trace, diagonal and products, and the layer and KV head of the worst of all;
    `head` is `None` for layer-wise matrices."""

    matrix: str
    errors: tuple[float, float, float]
    layer: int
    head: int | None

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.errors)


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
    counters = (counter.to_bytes(4, "big") for counter in range(-(-d // 256)))
    blocks = b"".join(hashlib.sha256(seed + counter).digest() for counter in counters)
    bits = np.unpackbits(np.frombuffer(blocks, dtype=np.uint8))[:d]
    return bits.astype(np.float64) * 2 - 1


def _sign_vectors(
    model_id: str, revision: str | None, name: str, layer_ids: Sequence[int], shape: tuple[int, ...]
) -> Matrix:
    """All sign vectors of one matrix: `[layers, (heads,) 2, d]`, `shape` without the 2."""
    *heads, d = shape[1:]
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
        square = len(shape) in (3, 4) and shape[-1] == shape[-2]
        if name not in MATRICES or not square or shape[0] != len(layer_ids):
            said = f"{name!r} of shape {list(shape)}, {len(layer_ids)} layers"
            raise UsageError(f"no fingerprint of a matrix {said}.")
        signs = _sign_vectors(model_id, revision, name, layer_ids, shape[:-1])
        tensors[f"{name}.trace"] = np.trace(stack, axis1=-2, axis2=-1).astype(np.float32)
        tensors[f"{name}.diag"] = np.diagonal(stack, axis1=-2, axis2=-1).astype(np.float32)
        tensors[f"{name}.sketch"] = np.asarray(signs @ np.swapaxes(stack, -2, -1), dtype=np.float32)
    return tensor_file.write(tensors)


def read_fingerprint(
    data: bytes, *, what: str = "the statistics"
) -> dict[str, NDArray[np.float32]]:
    """Parse an untrusted fingerprint file: `<matrix>.trace`, `.diag`, `.sketch`, float32."""

    def bad(reason: str, message: str) -> NoReturn:
        raise MalformedFile(f"stats.{reason}", f"{what}: {message}.")

    tensors = tensor_file.read(data, what=what)
    for key, value in tensors.items():
        name, _, part = key.partition(".")
        if name not in MATRICES or part not in _PARTS:
            bad("name", f"unknown entry {key[:60]!r}")
        if not np.isfinite(value).all():
            bad("values", f"{key} has a value that is not finite")
    for name in {key.partition(".")[0] for key in tensors}:
        if any(f"{name}.{part}" not in tensors for part in _PARTS):
            bad("name", f"{name} needs trace, diag and sketch")
        trace, diag, sketch = (tensors[f"{name}.{part}"].shape for part in _PARTS)
        fits = diag[:-1] == trace and sketch == (*trace, _SKETCHES, diag[-1])
        if len(trace) not in (1, 2) or not fits:
            bad("shape", f"the shapes of {name} do not go together")
    return tensors


def compare(
    rotations: RotationSet,
    fingerprint: Mapping[str, NDArray[np.float32]],
    model_id: str,
    revision: str | None,
) -> FingerprintMatch | None:
    """Compare every layer and head with the fingerprint: the worst relative errors, infinite when
    the shapes differ, or `None` when nothing can be compared: no eigenvalues, an objective without
    a target, or a fingerprint without that matrix."""
    hessian, _, composition = rotations.objective.partition("_")
    name = TARGETS.get(hessian) if composition in _FACTORS else None
    if name is None or f"{name}.trace" not in fingerprint:
        return None
    if rotations.layers[0].eigenvalues is None:
        return None
    implied = ([*_products(layer, composition)] for layer in rotations.layers)
    return _match(name, rotations, fingerprint, (model_id, revision), implied)


def _match(
    name: str,
    rotations: RotationSet,
    fingerprint: Mapping[str, NDArray[np.float32]],
    identity: tuple[str, str | None],
    implied: Iterable[Sequence[Matrix]],
) -> FingerprintMatch:
    """Compare what the layers imply with the recorded matrix `name`. Of several matrices that a
    layer may imply, the best one counts."""
    shape = (len(rotations.layers), *rotations.layers[0].forward.shape[:-1])
    stored = [np.asarray(fingerprint[f"{name}.{part}"], dtype=np.float64) for part in _PARTS]
    if stored[1].shape != shape:
        return _infinite(name, rotations)
    signs = _sign_vectors(*identity, name, rotations.layer_ids, shape)
    of_layers = [
        np.min([_errors(one, [part[at] for part in stored], signs[at]) for one in options], axis=0)
        for at, options in enumerate(implied)
    ]
    errors = np.stack(of_layers)
    trace, diag, sketch = map(float, errors.reshape(-1, 3).max(axis=0))
    place = np.unravel_index(errors.max(axis=-1).argmax(), errors.shape[:-1])
    head = int(place[1]) if len(place) > 1 else None
    return FingerprintMatch(name, (trace, diag, sketch), rotations.layer_ids[int(place[0])], head)


def _infinite(name: str, rotations: RotationSet) -> FingerprintMatch:
    return FingerprintMatch(name, (np.inf, np.inf, np.inf), rotations.layer_ids[0], None)


def _errors(matrix: Matrix, stored: Sequence[Matrix], signs: Matrix) -> Matrix:
    """Of trace, diagonal and products of `[(heads,) d, d]`: `[(heads,) 3]`."""
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    errors = (
        _relative(diagonal.sum(axis=-1)[..., None], stored[0][..., None]),
        _relative(diagonal, stored[1]),
        _relative(signs @ np.swapaxes(matrix, -2, -1), stored[2]).max(axis=-1),
    )
    return np.stack(errors, axis=-1)


def _relative(value: Matrix, reference: Matrix) -> Matrix:
    """L2 norm of the difference over the L2 norm of the reference, along the last axis."""
    scale = np.maximum(np.linalg.norm(reference, axis=-1), np.finfo(np.float32).tiny)
    return np.asarray(np.linalg.norm(value - reference, axis=-1) / scale)


def _products(layer: LayerTransform, composition: str) -> Iterator[Matrix]:
    """U diag(lambda) U^T for ascending eigenvalues, and where some are equal, for the stable order
    of ties too. Eigenvalues that differ in float64 may be equal in the file, so the ascending order
    comes first."""
    values = np.asarray(layer.eigenvalues, dtype=np.float64)
    factors, d = _FACTORS[composition], values.shape[-1]
    if composition == "br_h128" and d != 128:
        yield np.full((*values.shape, d), np.inf)
        return
    orders = [np.broadcast_to(pbr_permutation(np.arange(d, dtype=np.float64)), values.shape)]
    if "P" in factors and (np.diff(values, axis=-1) == 0).any():
        orders.append(np.apply_along_axis(pbr_permutation, -1, values))
    for order in orders:
        basis = _undo(layer.forward.astype(np.float64), factors, order)
        yield (basis * values[..., None, :]) @ np.swapaxes(basis, -2, -1)


def _undo(matrix: Matrix, factors: str, permutation: NDArray[np.int64]) -> Matrix:
    """Strip every factor but U from both ends of `matrix`."""
    h = hadamard(matrix.shape[-1])
    inverse = np.argsort(permutation, axis=-1)
    before, after = factors.split("U")
    for factor in before:
        # P^T X moves row j to row permutation[j]
        moved = np.take_along_axis(matrix, permutation[..., None], axis=-2)
        matrix = h @ matrix if factor == "H" else moved
    for factor in reversed(after):
        moved = np.take_along_axis(matrix, inverse[..., None, :], axis=-1)
        matrix = matrix @ h if factor == "H" else moved
    return matrix


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
    role, estimators = rotations.declared_role, manifest.fit.estimator
    if role is None or estimators is None or rotations.layers[0].eigenvalues is None:
        return None
    estimator, names = estimators.k if role == "k" else estimators.v, WUSH_MATRICES[role]
    gamma, damping = estimator.params.get("gamma"), estimator.params.get("damping")
    usual = (
        rotations.transform == "wush"
        and estimator.id == f"wush-{role}/1"
        and rotations.grouping == "kv_head"
        and not rotations.centered
        and damping in ("identity", "diagonal")
        and all(f"{name}.trace" in fingerprint for name in names)
    )
    if not usual or type(gamma) not in (int, float) or not 0 <= float(gamma or 0) <= 1:
        return None
    traces = fingerprint[f"{names[0]}.trace"].astype(np.float64)
    diagonals = [fingerprint[f"{name}.diag"].astype(np.float64) for name in names]
    shape = len(rotations.layers), rotations.num_kv_heads
    fits = traces.shape == shape and all(one.shape[:2] == shape for one in diagonals)
    if not fits or not (traces > 0).all():
        return [_infinite(name, rotations) for name in names]
    group = manifest.model.num_q_heads // manifest.model.num_kv_heads
    composition = manifest.fit.composition
    implied = [
        _implied(
            layer,
            trace,
            recorded,
            gamma=float(gamma or 0),
            diagonal=damping == "diagonal",
            descending=composition is not None and composition.permutation == "descending",
            scale=2.0 * group if role == "k" else 2.0,
        )
        for layer, trace, *recorded in zip(rotations.layers, traces, *diagonals, strict=True)
    ]
    identity = manifest.model.id, manifest.model.revision
    return [
        _match(name, rotations, fingerprint, identity, [[pair[which]] for pair in implied])
        for which, name in enumerate(names)
    ]


def _implied(
    layer: LayerTransform,
    trace: Matrix,
    recorded: Sequence[Matrix],
    *,
    gamma: float,
    diagonal: bool,
    descending: bool,
    scale: float,
) -> tuple[Matrix, Matrix]:
    """M and the matrix that Hs is `scale` times, of every head of a layer, undamped; `trace` is
    that of M, and `recorded` has the diagonals of both, which tell how channels without any were
    damped."""
    roots = np.sqrt(np.asarray(layer.eigenvalues, dtype=np.float64).clip(0))
    h = hadamard(roots.shape[-1])
    middle = (h * (roots[..., ::-1] if descending else roots)[..., None, :]) @ h
    c2 = (1 + gamma) * trace / roots.sum(-1)  # the last eigenvalue is positive in every such file

    def undamped(matrix: NDArray[np.float32], factor: Matrix, own: Matrix) -> Matrix:
        """C of C + gamma tr(C)/d I, or of C + gamma diag(C), where C has a diagonal."""
        exact = matrix.astype(np.float64)
        product = factor[..., None, None] * (exact @ middle @ np.swapaxes(exact, -2, -1))
        diag = np.diagonal(product, axis1=-2, axis2=-1)
        added = gamma / (1 + gamma) * (diag if diagonal else diag.mean(-1, keepdims=True))
        if diagonal and own.shape == diag.shape:
            mean = own.mean(-1, keepdims=True)
            added = np.where(own > WUSH_NOTHING * mean, added, WUSH_EMPTY * mean)
        return np.asarray(product - added[..., None] * np.eye(product.shape[-1]))

    gram, hessian = recorded
    return (undamped(layer.partner, c2, gram), undamped(layer.forward, 1 / (c2 * scale), hessian))
