"""Rows of calibration text that `wush-tuned` is tuned on: at most some thousand tokens, kept in main memory.

They are those of whole sequences, evenly spaced over all, cut where a limit is reached. A second pass over that text
shows them; moments, which are all that a capture leaves, do not have them.

Ordinary text hardly makes a model fetch a single fact from far back. The first half of each sequence, twice, does: to
know how the copy goes on it looks for the place in the first half (the induction heads of Olsson et al., 2022). A third
pass over such text shows which queries do that, and which rows they read: see `methods.base.FarReads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.heldout import SCORES_AT_ONCE, history_mask, watch
from oscar_zoo.compute.methods.base import FarReads
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.models import LoadedModel

MOST_TOKENS = 16_384
"""Tokens kept: on unseen text values gain 28 % with these and 26 % with half of them (measured, 64 channels)."""
MOST_BYTES = 2 << 30
"""Of main memory, if that is less."""
READERS, READ = 256, 8
"""Queries kept of a sequence and KV head, and rows of each."""
LOOKED_AT = 2
"""One of so many queries is looked at."""
READ_BYTES = 1 << 29
"""Of main memory for both, if that is less."""
SEED = 0
"""Of the choice of readers."""


@dataclass(frozen=True)
class CalibrationRows:
    """See `methods.base.RowsOfText`.

    Attributes:
        device: where rows are wanted.
        group_size: channels that will share a scale.
        kept: side and layer id -> `[num_kv_heads, T, d]`, in main memory.
        reads: layer id -> far reads, in main memory.
    """

    device: torch.device
    group_size: int
    kept: dict[tuple[Role, int], Tensor]
    reads: dict[int, FarReads]

    def of(self, role: Role, layer_id: int) -> Tensor:
        """`[num_kv_heads, T, d]` in the model's dtype, before any transform, on `device`."""
        return self.kept[role, layer_id].to(self.device)

    def far_reads(self, layer_id: int) -> FarReads | None:
        """See `methods.base.RowsOfText`."""
        found = self.reads.get(layer_id)
        if found is None:
            return None
        return FarReads(*(x.to(self.device) for x in (found.queries, found.keys, found.weights)))


def collect_rows(
    loaded: LoadedModel, sequences: Sequence[Sequence[int]], group_size: int, windows: Windows
) -> CalibrationRows:
    """Run a model over some of `sequences` and keep their K and V rows, and what reads far back when they repeat.

    Args:
        windows: what a server never reads from INT2 is not far.

    Raises:
        ComputeFailed: rows that are not finite.
        UnsupportedModel: attention that cannot be seen.
    """
    chosen = pick(sequences, most_tokens(loaded.block, torch.finfo(getattr(torch, loaded.dtype)).bits // 8))
    parts: dict[tuple[Role, int], list[Tensor]] = {}

    def see(layer_id: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        sides: tuple[tuple[Role, Tensor], ...] = (("k", key), ("v", value))
        for role, rows in sides:
            if not bool(torch.isfinite(rows).all()):
                raise ComputeFailed(
                    f"layer {layer_id} gives {role.upper()} rows that are not finite.", hint="try --dtype float32"
                )
            parts.setdefault((role, layer_id), []).append(rows.cpu().clone())

    watch(loaded, chosen, see)
    kept = {}
    while parts:
        at, rows = parts.popitem()
        kept[at] = torch.cat(rows, 1)
    return CalibrationRows(loaded.device, group_size, kept, collect_reads(loaded, chosen, windows))


def collect_reads(loaded: LoadedModel, sequences: Sequence[Sequence[int]], windows: Windows) -> dict[int, FarReads]:
    """The far reads of every layer in the first half of each sequence, said twice.

    Queries are drawn without replacement, the more often the more weight some row of their history has.
    """
    twice = [[*one[: len(one) // 2]] * 2 for one in sequences if len(one) // 2 >= windows.recent + windows.sink]
    block, draw = loaded.block, torch.Generator().manual_seed(SEED)
    size = torch.finfo(getattr(torch, loaded.dtype)).bits // 8
    one = len(block.attention_layers) * block.num_kv_heads * (READ + 1) * block.head_dim * size
    most = min(READERS, READ_BYTES // (one * max(1, len(twice))))
    parts: dict[int, list[FarReads]] = {}

    def see(layer_id: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        parts.setdefault(layer_id, []).append(_reads(query, key, scaling, windows, most, draw))

    if twice and most:
        watch(loaded, twice, see)
    return {
        layer: FarReads(*(torch.cat(x, 1) for x in zip(*((p.queries, p.keys, p.weights) for p in found), strict=True)))
        for layer, found in parts.items()
    }


def _reads(query: Tensor, key: Tensor, scaling: float, windows: Windows, most: int, draw: torch.Generator) -> FarReads:
    """Of one layer and sequence, in main memory; arguments as of `heldout.HeldOutRows.add`."""
    (kv_heads, tokens, _), far = key.shape, key.float().mT[:, None]
    grouped = query.unflatten(0, (kv_heads, -1))
    found, size = [], max(1, SCORES_AT_ONCE // (len(query) * tokens))
    positions = torch.arange(tokens // 2, tokens, LOOKED_AT, device=key.device)
    for at in positions.split(size):
        logits = grouped[:, :, at].float() * scaling @ far
        future = torch.arange(tokens, device=key.device) > at[:, None]
        weights = logits.masked_fill_(future, float("-inf")).softmax(-1)
        found.append(weights.masked_fill_(~history_mask(at, tokens, windows), 0.0).topk(min(READ, tokens), -1))
    weights, rows = (torch.cat(x, 2).flatten(1, 2) for x in zip(*found, strict=True))  # [kv_heads, queries, READ]
    chance = -torch.rand(weights.shape[:2], generator=draw).log().to(key.device)  # the least of chance / weight: a draw
    chosen = (weights[..., 0] / chance).topk(min(most, weights.shape[1]), -1).indices
    heads = torch.arange(kv_heads, device=key.device)[:, None]
    queries = (grouped[:, :, positions].flatten(1, 2) * scaling)[heads, chosen]
    keys = key[heads[..., None], rows[heads, chosen]]
    return FarReads(queries.cpu(), keys.cpu(), weights[heads, chosen].cpu())


def most_tokens(block: ModelBlock, bytes_each: int) -> int:
    """How many tokens' rows are kept of a model whose numbers have `bytes_each`."""
    one = len(block.attention_layers) * block.num_kv_heads * (block.head_dim + block.v_head_dim) * bytes_each
    return min(MOST_TOKENS, MOST_BYTES // one)


def pick(sequences: Sequence[Sequence[int]], most: int) -> list[Sequence[int]]:
    """At most `most` tokens: every n-th sequence, the last of them cut."""
    step = -(-sum(map(len, sequences)) // most)
    chosen: list[Sequence[int]] = []
    left = most
    for one in sequences[::step]:
        if left > 0:
            chosen.append(one[:left])
            left -= len(one)
    return chosen
