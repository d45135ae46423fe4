"""Rows that a model caches of some text: held-out ones to measure fits on, others to tune on.

No fit ever sees held-out rows. One forward pass shows the rows of all layers. Two kinds of queries
are kept: evenly spaced ones, which represent all queries, and those that put the most weight on a
single INT2 row. The second kind is rare, but it retrieves facts from far back, and an average over
all queries hardly shows its errors. Rows wait in main memory in the model's dtype (two bytes per
channel: 1.2 GB for 8,192 tokens of an 8B model) and come to the device layer by layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.capture.transformers import output_weights
from oscar_zoo.compute.methods.base import CalibrationRows
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.models.attention import Softmax, attend, attention_scope
from oscar_zoo.models.layer_replay import run_by_layer
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.next_step import AddOption

EVEN, FOCUSED = 64, 64
"""Queries of each kind kept of a sequence, all heads alike."""
SCORES_AT_ONCE = 1 << 23
"""Attention scores computed at once: bounds memory, 32 MB for each of a few tensors."""
MOST_TOKENS = 16_384
"""Tokens kept to tune on: on unseen text values gain 28 % with these and 26 % with half of them
(measured, 64 channels)."""
MOST_BYTES = 2 << 30
"""Largest share of main memory, if that is less."""


@dataclass(frozen=True)
class Queries:
    """Some queries of a sequence.

    Attributes:
        positions: `[n]` int64, ascending: their positions in the sequence.
        rows: `[num_q_heads, n, d]` after norm and RoPE, before scaling.
    """

    positions: Tensor
    rows: Tensor

    def to(self, device: torch.device) -> Queries:
        """A copy on another device."""
        return Queries(self.positions.to(device), self.rows.to(device))


@dataclass(frozen=True)
class SequenceRows:
    """What one attention layer saw of one sequence that starts at position 0.

    Attributes:
        even: queries evenly spaced among those with history.
        focused: the queries of which some head looks hardest at a row of its history.
        key: `[num_kv_heads, T, d]` after norm and RoPE.
        value: `[num_kv_heads, T, dv]`.
    """

    even: Queries
    focused: Queries
    key: Tensor
    value: Tensor

    def to(self, device: torch.device) -> SequenceRows:
        """A copy on another device."""
        parts = (self.even, self.focused, self.key, self.value)
        return SequenceRows(*(one.to(device) for one in parts))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerRows:
    """What one attention layer saw of all held-out sequences; `o_proj` is `[hidden, num_q_heads *
    dv]`, the weights that read the attention output."""

    sequences: tuple[SequenceRows, ...]
    o_proj: Tensor
    softmax: Softmax


RowSource = Callable[[int], LayerRows]
"""Layer id -> its rows, on the device where to compute; may be asked for a layer more than once."""


class HeldOutRows:
    """A `RowSource` that `collect` filled. Queries that read no INT2 row through the `windows` are
    not kept; `o_proj` is of a layer, `[hidden, num_q_heads * dv]`; rows are wanted on `device`."""

    def __init__(
        self, windows: Windows, device: torch.device, o_proj: Callable[[int], Tensor]
    ) -> None:
        self._windows, self._device, self._o_proj = windows, device, o_proj
        self._layers: dict[int, list[SequenceRows]] = {}
        self._softmax: dict[int, Softmax] = {}

    def add(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> None:
        """Keep what one layer sees of one sequence.

        Args:
            query: `[num_q_heads, T, d]`; key, value: `[num_kv_heads, T, ..]`, heads not repeated.
        """
        _check_finite(layer_id, query=query, key=key, value=value)
        first, tokens = self._windows.sink + self._windows.recent, query.shape[1]
        readers = torch.arange(min(first, tokens), tokens, device=query.device)
        even = readers[:: max(1, -(-len(readers) // EVEN))]
        focused = readers[_focused(query[:, readers], key, readers, self._windows, softmax)]
        kept = SequenceRows(
            Queries(even, query[:, even]), Queries(focused, query[:, focused]), key, value
        )
        self._layers.setdefault(layer_id, []).append(kept.to(torch.device("cpu")))
        self._softmax[layer_id] = softmax

    def __call__(self, layer_id: int) -> LayerRows:
        """See `RowSource`."""
        moved = tuple(sequence.to(self._device) for sequence in self._layers.get(layer_id, ()))
        softmax = self._softmax.get(layer_id, Softmax(1.0)).to(self._device)
        return LayerRows(moved, self._o_proj(layer_id).to(self._device), softmax)


def collect(
    loaded: LoadedModel,
    sequences: Sequence[Sequence[int]],
    windows: Windows,
    *,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> HeldOutRows:
    """Run a model over sequences and keep the rows of its full-attention layers."""
    kept = HeldOutRows(windows, loaded.device, output_weights(loaded, sequences[0]))
    watch(loaded, sequences, kept.add, tick=tick)
    return kept


def watch(
    loaded: LoadedModel,
    sequences: Sequence[Sequence[int]],
    see: Callable[[int, Tensor, Tensor, Tensor, Softmax], None],
    *,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run a model over sequences and show the rows of its full-attention layers. `tick` gets
    sequences done and in all; when all go through a layer together, each layer counts as its
    share."""
    layers, seen = len(loaded.block.attention_layers), 0

    def attention(
        layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        nonlocal seen
        see(layer_id, query[0], key[0], value[0], softmax)
        seen += 1
        tick(min(seen // layers, len(sequences)), len(sequences))
        return attend(query, key, value, None, softmax)

    with torch.inference_mode(), attention_scope(loaded, attention):
        ids = [torch.tensor(list(one), device="cpu") for one in sequences]
        if loaded.streamed:
            deque(run_by_layer(loaded.model, loaded.block.num_layers, ids), 0)
        else:
            for one in ids:
                loaded.model.base_model(input_ids=one[None].to(loaded.device), use_cache=False)


def _check_finite(layer_id: int, **rows: Tensor) -> None:
    for name, some in rows.items():
        if not bool(torch.isfinite(some).all()):
            raise ComputeFailed(
                f"layer {layer_id} gives {name} rows that are not finite.",
                hint="check the weights",
                next_step=AddOption("--dtype", "float32"),
            )


def history_mask(positions: Tensor, tokens: int, windows: Windows) -> Tensor:
    """`[n, tokens]` bool: which keys the queries at `positions` read from INT2."""
    s = torch.arange(tokens, device=positions.device)
    return (s >= windows.sink) & (positions[:, None] - s >= windows.recent)


def _focused(
    query: Tensor, key: Tensor, positions: Tensor, windows: Windows, softmax: Softmax
) -> Tensor:
    """Ascending indices of the queries that put the most weight on one INT2 row, for any head.
    `query` is `[num_q_heads, n, d]`."""
    heads, tokens = query.shape[0], key.shape[1]
    keys = key.float().mT
    if not len(positions):
        return positions
    weights = []
    size = max(1, SCORES_AT_ONCE // (heads * tokens))
    for block, at in zip(query.split(size, 1), positions.split(size), strict=True):
        rows = block.float().unflatten(0, (key.shape[0], -1)) * softmax.scaling
        logits = softmax.capped((rows @ keys[:, None]).flatten(0, 1))
        future = torch.arange(tokens, device=at.device) > at[:, None]
        total = softmax.total(logits.masked_fill_(future, float("-inf")))[..., 0]
        largest = logits.masked_fill_(~history_mask(at, tokens, windows), float("-inf")).amax(-1)
        weights.append((largest - total).amax(0))
    return torch.cat(weights).topk(min(FOCUSED, len(positions))).indices.sort().values


def collect_rows(
    loaded: LoadedModel,
    sequences: Sequence[Sequence[int]],
    group_size: int,
    *,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> CalibrationRows:
    """Run a model over some of `sequences` and keep their K and V rows, to tune methods on. They
    are whole sequences, evenly spaced over all, cut at a limit. Moments do not hold rows, so this
    is a second pass over the text."""
    parts: dict[tuple[Role, int], list[Tensor]] = {}

    def see(layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> None:
        sides: tuple[tuple[Role, Tensor], ...] = (("k", key), ("v", value))
        _check_finite(layer_id, key=key, value=value)
        for role, rows in sides:
            parts.setdefault((role, layer_id), []).append(rows.cpu().clone())

    bytes_each = torch.finfo(getattr(torch, loaded.dtype)).bits // 8
    watch(loaded, pick(sequences, most_tokens(loaded.block, bytes_each)), see, tick=tick)
    kept = {}
    while parts:  # each part goes as soon as it is joined
        at, rows = parts.popitem()
        kept[at] = torch.cat(rows, 1)
    return CalibrationRows(loaded.device, group_size, kept)


def most_tokens(block: ModelBlock, bytes_each: int) -> int:
    """Most tokens whose rows are kept, when one number has `bytes_each` bytes."""
    heads = len(block.attention_layers) * block.num_kv_heads
    return min(MOST_TOKENS, MOST_BYTES // (heads * sum(block.head_dims) * bytes_each))


def pick(sequences: Sequence[Sequence[int]], most: int) -> list[Sequence[int]]:
    """At most `most` tokens from every n-th sequence; the last one is cut."""
    step = -(-sum(map(len, sequences)) // most)
    chosen: list[Sequence[int]] = []
    left = most
    for one in sequences[::step]:
        if left > 0:
            chosen.append(one[:left])
            left -= len(one)
    return chosen
