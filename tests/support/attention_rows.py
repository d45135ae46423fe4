"""Rows of one attention layer made of random numbers, and caches to measure on them."""

import torch
from torch import Tensor

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.capture.rows import LayerRows, Queries, SequenceRows
from oscar_zoo.evaluate.simulated_cache import Side
from oscar_zoo.models.attention import Softmax

WINDOWS = Windows(sink=3, recent=5)


def random_rows(
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    lengths: tuple[int, ...] = (40, 33),
    seed: int = 0,
    windows: Windows = WINDOWS,
    softmax: Softmax | None = None,
) -> LayerRows:
    """Queries with history of sequences of some lengths; every third one is evenly spaced, the
    others are focused."""
    draw = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    sequences = []
    for tokens in lengths:
        at = torch.arange(min(tokens, windows.sink + windows.recent), tokens)
        query = 2 * rows(heads[0], len(at), dims[0])
        key, value = rows(heads[1], tokens, dims[0]), rows(heads[1], tokens, dims[1])
        kinds = [Queries(at[kept], query[:, kept]) for kept in (at % 3 == 0, at % 3 != 0)]
        sequences.append(SequenceRows(*kinds, key, value))
    weights = rows(24, heads[0] * dims[1])
    return LayerRows(tuple(sequences), weights, softmax or Softmax(dims[0] ** -0.5))


def plain(width: int, *, group: int | None = None, clip: float = 0.0) -> Side:
    return Side(None, None, None, QuantSpec(width, group or width, clip, "float32"))


def paired(size: int, *, clip: float = 0.0, seed: int = 1) -> Side:
    """A transform that is not orthogonal, with a mean, per KV head."""
    draw = torch.Generator().manual_seed(seed)
    forward = torch.eye(size) + 0.3 * torch.randn(2, size, size, generator=draw)
    mean = torch.randn(2, 1, size, generator=draw)
    return Side(forward, torch.linalg.inv(forward).mT, mean, QuantSpec(size, size, clip, "float16"))
