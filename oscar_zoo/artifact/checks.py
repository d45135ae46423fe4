"""Checks of one rotation file that need only its numbers.

They ask whether it is finite, invertible, ordered, and no placeholder. A check returns a `Finding`,
which people read, or raises the `Refused` of why the file must not be used. Limits are measured: a
float64 fit stored as float32 stays below 6e-8, a float32 fit below 1.1e-6, and a matrix that went
through bf16 is at 1e-3. Layers are checked on all cores, with one thread of BLAS for each: those of
OpenBLAS wait for each other by spinning, which costs more than the products.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard
from oscar_zoo.artifact.outcome import Grade, State, reject

FP64_LIMIT = 2e-7
FP32_LIMIT = 5e-6
CONDITION_LIMIT = 1e3
FEEDBACK_LIMIT = 1e3
"""Of a weight of feedback; the largest of SmolLM2-135M is 1.4."""
EIGENVALUE_NOISE = 1e-6
SAME_MATRIX = 1e-4
LOCALISATION = {"k": 2.0, "v": 1.15}
"""Least score that real calibrated files show; random matrices reach 1.0."""
LOCALISATION_MIN_DIM = 64
MAX_WORKERS = 4
"""Threads that work at once; each holds the intermediate results of one layer."""

_TINY = np.float32(np.finfo(np.float32).tiny)
_PROBES, _POWER_STEPS = 4, 8
"""Columns and steps of the power iteration of `_spectral_norm`."""
_NO_EIGENVECTORS = ("hadamard", "pbr", "h_pbr")
"""Objectives or compositions whose matrices do not depend on data, so all layers are equal."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_lock = threading.Lock()
_holders = 0
_before = 1


@dataclass(frozen=True)
class Finding:
    """The result of a check that passed; `warnings` are stable codes."""

    detail: str
    warnings: tuple[str, ...] = ()
    checked: bool = True

    @property
    def state(self) -> State:
        if not self.checked:
            return "not checked"
        return "warning" if self.warnings else "ok"


def data_free(rotations: RotationSet) -> bool:
    """Whether the declared objective makes the same matrix for every layer."""
    return (rotations.composition or rotations.objective) in _NO_EIGENVECTORS


def numeric(rotations: RotationSet) -> tuple[Finding, Grade]:
    """All values finite, and forward @ partner.T = I in float64, largest absolute deviation.

    At most 2e-7 is the precision of a float64 fit, at most 5e-6 that of a float32 fit (a warning),
    above is refused. Entries of a pair of inverses are larger than those of a rotation, and so is
    what rounding them makes: the first limit is in units of `_rounding_unit`.
    """
    worst = rounding = condition = 0.0
    for layer, errors, *of_layer in over_cores(_measured, _distinct(rotations)):
        if errors is None:
            message = f"layer {layer.layer_id} has NaN or infinite values"
            reject("not_finite", message, layer=layer.layer_id)
        weight = 0.0 if layer.feedback is None else float(np.abs(layer.feedback).max())
        if weight > FEEDBACK_LIMIT:
            message = f"the feedback of layer {layer.layer_id} has a weight of {weight:.1e}"
            reject(
                "feedback.range",
                message,
                layer=layer.layer_id,
                measured=weight,
                limit=FEEDBACK_LIMIT,
            )
        largest = float(errors.max())
        if largest > FP32_LIMIT:
            word = "is not orthogonal" if rotations.orthogonal else "and its partner are no inverse"
            reject(
                "not_orthogonal" if rotations.orthogonal else "not_inverse",
                f"the matrix of layer {layer.layer_id} {word}: {largest:.1e}, limit {FP32_LIMIT}",
                layer=layer.layer_id,
                head=int(errors.argmax()) if errors.ndim else None,
                measured=largest,
                limit=FP32_LIMIT,
            )
        worst = max(worst, largest)
        rounding, condition = max(rounding, of_layer[0]), max(condition, of_layer[1])
    formula = "R R^T" if rotations.orthogonal else "R Q^T"
    detail = f"max |{formula} - I| = {worst:.1e}"
    detail += f", condition {condition:.0f}" if condition else ""
    grade: Grade = "fp32" if rounding > FP64_LIMIT else "fp64"
    found = {
        "numeric.fp32_grade": grade == "fp32",
        "numeric.condition": condition > CONDITION_LIMIT,
    }
    return Finding(detail, tuple(code for code, holds in found.items() if holds)), grade


def _measured(
    layer: LayerTransform,
) -> tuple[LayerTransform, NDArray[np.float64] | None, float, float]:
    """Per head, max |forward @ partner.T - I| in float64, or `None` where a value is not finite;
    the worst of them in units of rounding; and the worst condition, 0 for a rotation."""
    if not all(np.isfinite(array).all() for array in _arrays(layer)):
        return layer, None, 0.0, 0.0
    rotation = layer.partner is layer.forward
    forward = layer.forward.astype(np.float64)
    partner = forward if rotation else layer.partner.astype(np.float64)
    product = forward @ np.swapaxes(partner, -2, -1) - np.eye(forward.shape[-1])
    errors = np.asarray(np.abs(product).max(axis=(-2, -1)))
    rounding = float((errors / _rounding_unit(layer)).max())
    if rotation or errors.max() > FP32_LIMIT:
        return layer, errors, rounding, 0.0
    norms = _spectral_norm(layer.forward) * _spectral_norm(layer.partner)
    return layer, errors, rounding, float(norms.max())


def _rounding_unit(layer: LayerTransform) -> NDArray[np.float64]:
    """Per head, the largest 2 sqrt(sum_k r_ik^2 q_jk^2), at least 1: roundings of single terms add
    up like noise. In this unit honest float32 copies of WUSH pairs are at 5e-8, as rotations are,
    for any condition measured."""
    if layer.partner is layer.forward:
        return np.ones(layer.forward.shape[:-2])
    squares = np.square(layer.forward) @ np.swapaxes(np.square(layer.partner), -2, -1)
    return np.asarray(2 * np.sqrt(squares.max(axis=(-2, -1)))).clip(1)


def eigenvalues(rotations: RotationSet) -> Finding:
    """Eigenvalues must ascend and end positive, with at most noise below zero. In Hadamard files,
    and only there, they are all 1."""
    if rotations.layers[0].eigenvalues is None:
        return Finding("no eigenvalues in this file", ("eigenvalues.missing",))
    ones = rotations.objective == "hadamard"
    smallest, ties = np.inf, 0
    for layer in rotations.layers:
        values = np.asarray(layer.eigenvalues, dtype=np.float64)
        first, last, steps = values[..., 0], values[..., -1], np.diff(values, axis=-1)
        place, at = f"the eigenvalues of layer {layer.layer_id}", {"layer": layer.layer_id}
        if ones != bool((values == 1).all()):
            said = f"are{' not' if ones else ''} all 1, as in a Hadamard file only"
            reject("eigenvalues.all_ones", f"{place} {said}", **at)
        if (steps < 0).any():
            reject("eigenvalues.order", f"{place} are not ascending", **at)
        if not (last > 0).all() or (first < -EIGENVALUE_NOISE * last).any():
            low = float(first.min())
            reject("eigenvalues.sign", f"{place} are negative", measured=low, **at)
        smallest = min(smallest, float((first / last).min()))
        ties += int((steps == 0).sum())
    if ones:
        return Finding("all 1, as declared")
    detail = f"ascending, smallest over largest {smallest:.1e}"
    return Finding(f"{detail}, {ties} tied", ("eigenvalues.tied",)) if ties else Finding(detail)


def content(rotations: RotationSet) -> Finding:
    """Matrices must be what the objective says: an identity, a permutation, a plain Hadamard matrix
    or a repeated layer in disguise is refused."""
    declared = rotations.composition or rotations.objective
    repeats = data_free(rotations)
    seen: dict[bytes, int] = {}

    def looked_at(layer: LayerTransform) -> tuple[int, tuple[str, str] | None, bytes]:
        digest = sha256(np.ascontiguousarray(layer.forward).data).digest()
        return layer.layer_id, _placeholder(layer, declared), digest

    for number, found, digest in over_cores(looked_at, _distinct(rotations)):
        if found:
            reject(found[0], f"the matrix of layer {number} {found[1]}", layer=number)
        twin = seen.setdefault(digest, number)
        if twin != number and not repeats:
            message = f"the matrix of layer {number} repeats that of layer {twin}"
            reject("content.equal_layers", message, layer=number)
    if rotations.objective == "uresidual":
        detail = "a uresidual file: published transposed, see its method"
        return Finding(detail, ("content.uresidual",))
    same = "the same matrix in every layer, as declared"
    return Finding(same if repeats else "every layer differs")


def _placeholder(layer: LayerTransform, declared: str) -> tuple[str, str] | None:
    """Code and words where a matrix of the layer is an identity, a permutation or a Hadamard
    matrix, undeclared. The first row tells almost every matrix apart; the others are compared
    whole."""
    d = layer.forward.shape[-1]
    matrices = layer.forward.reshape(-1, d, d)
    if _count_near(matrices, np.eye(d)):
        return "content.identity", "is the identity"
    units = matrices[np.abs(matrices[:, 0]).max(axis=-1) > 1 - SAME_MATRIX]
    largest, length = np.abs(units).max(axis=-1), np.linalg.norm(units, axis=-1)
    permuting = ((largest > 1 - SAME_MATRIX) & (length < 1 + SAME_MATRIX)).all(axis=-1)
    if declared != "pbr" and permuting.any():
        return "content.permutation", "only permutes channels"
    plain = _count_near(matrices, hadamard(d))
    if declared == "hadamard" and plain < len(matrices):
        return "content.not_hadamard", "is not the Hadamard matrix"
    if declared != "hadamard" and plain:
        return "content.hadamard", "is the plain Hadamard matrix"
    return None


def _count_near(matrices: NDArray[np.float32], known: NDArray[np.float64]) -> int:
    """How many of `[n, d, d]` are `known` up to `SAME_MATRIX` in every element."""
    alike = matrices[(np.abs(matrices[:, 0] - known[0]) < SAME_MATRIX).all(axis=-1)]
    return int((np.abs(alike - known) < SAME_MATRIX).all(axis=(-2, -1)).sum())


def localisation(sides: dict[str, RotationSet]) -> Finding:
    """Compare K and V with what real files show; warnings only. The score is the mean over layers
    of s = d/3 * mean over columns of sum(W^4), with W = R H. Keys score above 2, values above 1.15
    in real files; a random rotation scores 1."""
    scores = {role: _score(side) for role, side in sides.items() if _has_score(side)}
    if not scores:
        detail = "not checked: only for the rotations of OSCAR, from 64 channels on"
        return Finding(detail, checked=False)
    warnings = [f"localisation.{role}" for role, x in scores.items() if x < LOCALISATION[role]]
    if len(scores) == 2 and scores["k"] <= scores["v"]:
        warnings.append("localisation.order")
    detail = ", ".join(f"{role.upper()} {score:.2f}" for role, score in scores.items())
    return Finding(f"score {detail}; random is 1.0", tuple(warnings))


def _has_score(rotations: RotationSet) -> bool:
    of_oscar = rotations.orthogonal and rotations.composition in ("r_h", "r_h_pbr")
    return of_oscar and rotations.head_dim >= LOCALISATION_MIN_DIM


def _score(rotations: RotationSet) -> float:
    h = hadamard(rotations.head_dim).astype(np.float32)
    # the mean over columns of a sum over d rows, times d/3; x ** 4 would call pow for every element
    fourth = over_cores(
        lambda layer: np.square(np.square(layer.forward @ h)).mean(), rotations.layers
    )
    return float(np.mean(list(fourth))) * rotations.head_dim**2 / 3


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
    return tuple(value for value in vars(layer).values() if isinstance(value, np.ndarray))


def _spectral_norm(matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """Largest singular value per matrix, a few percent too small at most, by power iteration on the
    fourth power of the Gram matrix, in float32."""
    scale = _largest(matrix)
    gram = matrix / scale
    gram = np.swapaxes(gram, -2, -1) @ gram
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
    return np.asarray(scale[..., 0, 0] * np.sqrt(norm), dtype=np.float64)


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
    workers = max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))
    with _one_blas_thread(), ThreadPoolExecutor(workers) as pool:
        yield from pool.map(function, items)


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
