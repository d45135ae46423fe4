"""The Hadamard matrix, the bit-reversal permutation, and the rotation set made of the matrix.

Checks and fits both use these definitions.

Source: composition `R = U H P` of OSCAR (paper section on rotation composition; code default
`r_h_pbr`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, Role, RotationSet
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import UsageError


def has_hadamard(d: int) -> bool:
    """Whether `hadamard(d)` is known here: powers of two, and many multiples of 8.

    Up to 256 these are all but 88, 136, 176, 184 and 232.
    """
    return d > 0 and (_odd(d) == 1 or (d % 8 == 0 and _root(2 * _odd(d) - 1) is not None))


def _require_hadamard(d: int) -> None:
    if not has_hadamard(d):
        raise UsageError(f"no Hadamard matrix for head_dim {d} is known here.")


@lru_cache(maxsize=16)
def hadamard(d: int) -> NDArray[np.float64]:
    """A Hadamard matrix divided by sqrt(d), symmetric and orthogonal, whose first row is constant.

    For a power of two it is Sylvester's. For another width it is the product of Sylvester's and of
    Paley's second construction, which is known for 12, 20, 28, 36 and others.

    Returns:
        `[d, d]` float64, read-only because it is cached.
    """
    _require_hadamard(d)
    odd = _odd(d)
    h: NDArray[np.float64] = np.ones((1, 1)) if odd == 1 else _paley(2 * odd - 1)
    while h.shape[0] < d:
        h = np.block([[h, h], [h, -h]])
    h = np.asarray(h / np.sqrt(d), dtype=np.float64)
    h.setflags(write=False)
    return h


def _odd(d: int) -> int:
    """`d` without its factors of two."""
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
    """`br[i]`: `i` with its log2(d) bits in reverse order; `[d]` int64.

    Where `d` is no power of two, the lowest bits of `i` are reversed, as many as `d` has factors of
    two, and the rest of `i` follows. So consecutive `i` lie in different groups of columns.
    """
    _require_hadamard(d)
    odd = _odd(d)
    bits = (d // odd).bit_length() - 1
    low = [int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return np.array([low[i % len(low)] * odd + i // len(low) for i in range(d)], dtype=np.int64)


def pbr_permutation(eigenvalues: NDArray[np.floating]) -> NDArray[np.int64]:
    """The column order of P: `perm[br(i)] = s[i]`, and `P = I[:, perm]`.

    `s` are the indices by descending eigenvalue.

    `X @ P` is `X[:, perm]`. For ascending eigenvalues this is always `perm[j] = d - 1 - br(j)`.

    Args:
        eigenvalues: `[d]`, any order.
    """
    order = np.argsort(-np.asarray(eigenvalues, dtype=np.float64), kind="stable")
    perm = np.empty_like(order)
    perm[bit_reversal(len(order))] = order
    return perm


def hadamard_name(geometry: Geometry) -> str:
    """What the matrices of a model's heads are called in a manifest."""
    widths = geometry.head_dim, geometry.v_head_dim
    return "sylvester" if all(_odd(width) == 1 for width in widths) else "paley"


def hadamard_set(geometry: Geometry, role: Role) -> RotationSet:
    """The data-free baseline: the Hadamard matrix in every attention layer.

    Its eigenvalues are all 1, because no covariance stands behind the matrix.
    """
    d = geometry.head_dim if role == "k" else geometry.v_head_dim
    matrix, ones = hadamard(d).astype(np.float32), np.ones(d, dtype=np.float32)
    return RotationSet(
        format_version=1,
        objective="hadamard",
        grouping="layer",
        transform="hadamard",
        orthogonal=True,
        centered=False,
        layers=tuple(
            LayerTransform(i, matrix, matrix, eigenvalues=ones) for i in geometry.attention_layers
        ),
    )
