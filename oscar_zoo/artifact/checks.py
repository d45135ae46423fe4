"""Checks of one rotation file that need only its numbers.

They ask whether it is finite, invertible, ordered, and no placeholder. Every check returns a
`CheckFinding`, which people read, or a `Problem`, the reason why the file must not be used. Limits
are measured: a float64 fit stored as float32 stays below 6e-8, a float32 fit below 1.1e-6, and a
matrix that went through bf16 is at 1e-3. Layers are checked on all cores, with one thread of BLAS
for each: those of OpenBLAS wait for each other by spinning, which costs more than the products.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard
from oscar_zoo.artifact.outcome import Grade, State

FP64_LIMIT = 2e-7
FP32_LIMIT = 5e-6
CONDITION_LIMIT = 1e3
EIGENVALUE_NOISE = 1e-6
SAME_MATRIX = 1e-4
LOCALISATION = {"k": 2.0, "v": 1.15}
"""Least score that real calibrated files show; random matrices reach 1.0."""

LOCALISATION_MIN_DIM = 64

_TINY = np.float32(np.finfo(np.float32).tiny)
_PROBES, _POWER_STEPS = 4, 8
"""Columns and steps of the power iteration of `_spectral_norm`."""

_NO_EIGENVECTORS = ("hadamard", "pbr", "h_pbr")
"""Objective or composition -> matrices that do not depend on data, so all layers are equal."""


MAX_WORKERS = 4
"""Threads that work at once; each holds the intermediate results of one layer."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_lock = threading.Lock()
_holders = 0
_before = 1


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


@dataclass(frozen=True)
class _Measured:
    """Per head of one layer: errors of the inverse and the unit of rounding; the worst condition,
    0 for a rotation."""

    errors: NDArray[np.float64]
    units: NDArray[np.float64]
    condition: float


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
    for layer, found in over_cores(_measured, _distinct(rotations)):
        if found is None:
            return Problem(
                "not_finite",
                f"layer {layer.layer_id} has NaN or infinite values",
                layer=layer.layer_id,
            )
        if found.errors.max() > FP32_LIMIT:
            return _not_inverse(rotations, layer, found.errors)
        worst = max(worst, float(found.errors.max()))
        rounding = max(rounding, float((found.errors / found.units).max()))
        condition = max(condition, found.condition)
    formula = "R R^T" if rotations.orthogonal else "R Q^T"
    detail = f"max |{formula} - I| = {worst:.1e}" + (
        f", condition {condition:.0f}" if condition else ""
    )
    warnings = (("numeric.fp32_grade",) if rounding > FP64_LIMIT else ()) + (
        ("numeric.condition",) if condition > CONDITION_LIMIT else ()
    )
    grade: Grade = "fp32" if rounding > FP64_LIMIT else "fp64"
    return CheckFinding(detail, "warning" if warnings else "ok", warnings), grade


def _measured(layer: LayerTransform) -> tuple[LayerTransform, _Measured | None]:
    """The numbers of one layer; `None` where a value is not finite."""
    if not all(np.isfinite(array).all() for array in _arrays(layer)):
        return layer, None
    condition = 0.0
    errors = _inverse_error(layer)
    if layer.partner is not layer.forward and errors.max() <= FP32_LIMIT:
        norms = _spectral_norm(layer.forward) * _spectral_norm(layer.partner)
        condition = float(norms.max())
    return layer, _Measured(errors, _rounding_unit(layer), condition)


def eigenvalues(rotations: RotationSet) -> CheckFinding | Problem:
    """Eigenvalues must ascend and end positive, with at most noise below zero. In Hadamard files,
    and only there, they are all 1."""
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
    """Matrices must be what the objective says: an identity, a permutation, a plain Hadamard matrix
    or a repeated layer in disguise is refused."""
    declared = rotations.composition or rotations.objective
    seen: dict[bytes, int] = {}

    def looked_at(layer: LayerTransform) -> tuple[LayerTransform, Problem | None, bytes]:
        digest = sha256(np.ascontiguousarray(layer.forward).data).digest()
        return layer, _placeholder(layer, declared), digest

    for layer, problem, digest in over_cores(looked_at, _distinct(rotations)):
        if problem:
            return problem
        twin = seen.setdefault(digest, layer.layer_id)
        if twin != layer.layer_id and not data_free(rotations):
            return Problem(
                "content.equal_layers",
                f"the matrix of layer {layer.layer_id} repeats that of layer {twin}",
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


def _placeholder(layer: LayerTransform, declared: str) -> Problem | None:
    """Where a matrix of the layer is an identity, a permutation or a Hadamard matrix, undeclared.
    The first row tells almost every matrix apart; the others are compared whole."""
    d, place = layer.forward.shape[-1], f"the matrix of layer {layer.layer_id}"
    h = hadamard(d)
    matrices = layer.forward.reshape(-1, d, d)
    if len(_near(matrices, np.eye(d))):
        return Problem("content.identity", f"{place} is the identity", layer=layer.layer_id)
    units = matrices[np.abs(matrices[:, 0]).max(axis=-1) > 1 - SAME_MATRIX]
    largest, length = np.abs(units).max(axis=-1), np.linalg.norm(units, axis=-1)
    permuting = ((largest > 1 - SAME_MATRIX) & (length < 1 + SAME_MATRIX)).all(axis=-1)
    if declared != "pbr" and permuting.any():
        return Problem(
            "content.permutation", f"{place} only permutes channels", layer=layer.layer_id
        )
    plain = len(_near(matrices, h))
    if declared == "hadamard" and plain < len(matrices):
        return Problem(
            "content.not_hadamard", f"{place} is not the Hadamard matrix", layer=layer.layer_id
        )
    if declared != "hadamard" and plain:
        return Problem(
            "content.hadamard", f"{place} is the plain Hadamard matrix", layer=layer.layer_id
        )
    return None


def _near(matrices: NDArray[np.float32], known: NDArray[np.float64]) -> NDArray[np.float32]:
    """Those of `[n, d, d]` that are `known` up to `SAME_MATRIX` in every element."""
    alike = matrices[(np.abs(matrices[:, 0] - known[0]) < SAME_MATRIX).all(axis=-1)]
    found = alike[(np.abs(alike - known) < SAME_MATRIX).all(axis=(-2, -1))]
    return np.asarray(found, dtype=np.float32)


def localisation_score(rotations: RotationSet) -> float | None:
    """Mean over layers of s = d/3 * mean over columns of sum(W^4), with W = R H; `None` where it
    means nothing for this set. Keys score above 2, values above 1.15 in real files; a random
    rotation scores 1. A hint, never a reason to refuse."""
    applies = rotations.orthogonal and rotations.composition in ("r_h", "r_h_pbr")
    if not applies or rotations.head_dim < LOCALISATION_MIN_DIM:
        return None
    h = hadamard(rotations.head_dim).astype(np.float32)
    # the mean over columns of a sum over d rows, times d/3; x ** 4 would call pow for every element
    fourth = over_cores(
        lambda layer: np.square(np.square(layer.forward @ h)).mean(), rotations.layers
    )
    return float(np.mean(list(fourth))) * rotations.head_dim**2 / 3


def localisation(sides: dict[str, RotationSet]) -> CheckFinding:
    """Compare the scores of K and V with what real files show; warnings only."""
    scores = {
        role: score
        for role, side in sides.items()
        if (score := localisation_score(side)) is not None
    }
    if not scores:
        return CheckFinding(
            "not checked: only for the rotations of OSCAR, from 64 channels on", "not checked"
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
    """The layers, without those whose arrays are the same objects as those of an earlier layer: a
    shared record is checked once."""
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
    """Per head, the largest 2 sqrt(sum_k r_ik^2 q_jk^2), at least 1: roundings of single terms add
    up like noise. In this unit honest float32 copies of WUSH pairs are at 5e-8, as rotations are,
    for any condition measured."""
    if layer.partner is layer.forward:
        return np.ones(layer.forward.shape[:-2])
    squares = np.square(layer.forward) @ np.swapaxes(np.square(layer.partner), -2, -1)
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
    """Largest singular value per matrix, a few percent too small at most, by power iteration on the
    fourth power of the Gram matrix, in float32."""
    gram = matrix / _largest(matrix)
    scale, gram = _largest(matrix)[..., 0, 0], np.swapaxes(gram, -2, -1) @ gram
    fourth = gram
    for _ in range(2):
        fourth = fourth / _largest(fourth)
        fourth = fourth @ fourth
    # columns with the signs of a fixed random draw: no matrix can be orthogonal to all of them
    signs = np.random.default_rng(0).standard_normal((matrix.shape[-1], _PROBES))
    vectors = np.broadcast_to(signs.astype(np.float32), (*matrix.shape[:-1], _PROBES))
    for _ in range(_POWER_STEPS):
        vectors = fourth @ (vectors / np.maximum(_length(vectors), _TINY))
    vectors = vectors / np.maximum(_length(vectors), _TINY)
    norm = _length(gram @ vectors).max(axis=-1)[..., 0]
    return np.asarray(scale * np.sqrt(norm), dtype=np.float64)


def _largest(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[.., 1, 1]`: the largest element by size, at least the smallest normal number."""
    largest = np.abs(matrix).max(axis=(-2, -1), keepdims=True)
    return np.asarray(np.maximum(largest, _TINY), dtype=np.float32)


def _length(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[.., 1, n]`: the length of every column."""
    return np.asarray(np.linalg.norm(columns, axis=-2, keepdims=True), dtype=np.float32)


def over_cores(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results of `function` for `items`, in their order. Work that was not begun is dropped
    when the caller stops early."""
    with _one_blas_thread(), ThreadPoolExecutor(_workers()) as pool:
        yield from pool.map(function, items)


def _workers() -> int:
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS use one thread per call until the last holder is done."""
    global _holders, _before
    blas = _openblas()
    if blas is None:
        yield
        return
    get, set_threads = blas
    with _lock:
        if _holders == 0:
            _before = get()
            set_threads(1)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                set_threads(_before)


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """How to read and set the threads of numpy's own OpenBLAS; `None` for another BLAS."""
    folder = Path(np.__file__).parent.with_name("numpy.libs")
    for path in sorted(folder.glob("lib*openblas*")):
        for prefix in ("scipy_openblas", "openblas"):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(str(path))  # loaded by numpy already: the same one
                get, set_threads = (
                    getattr(library, f"{prefix}_{verb}_num_threads64_") for verb in ("get", "set")
                )
                get.restype, set_threads.argtypes = ctypes.c_int, [ctypes.c_int]
                return get, set_threads
    return None
