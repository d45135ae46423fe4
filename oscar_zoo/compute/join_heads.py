"""What the ranks of a tensor-parallel group saw of one layer, joined by head.

A KV head lives on one rank or, when there are more ranks than KV heads, on several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.products import same
from oscar_zoo.errors import ComputeFailed

_KEY_VALUE_SUMS = ("kk", "k_sum", "vv", "v_sum")


def join_heads(parts: Sequence[LayerMoments]) -> LayerMoments:
    """Join what tensor-parallel ranks saw of one layer over the same tokens.

    KV heads come out in ascending order.

    A KV head on one rank is taken as it is. Where several ranks hold the same KV head they have
    the same keys and values and different query heads: kk, k_sum, vv, v_sum are taken once, qq,
    oo and wo added. The weighted sums are linear in the target; their mean, weighted by query
    rows, is right both for targets of each rank's own queries and for one common target.

    Raises:
        ComputeFailed: replicas of a head differ, or the ranks did not see the same tokens.
    """
    holders: dict[int, list[tuple[LayerMoments, int]]] = {}
    for part in parts:
        for position, head in enumerate(part.heads):
            holders.setdefault(head, []).append((part, position))
    joined = [_join_replicas(head, held) for head, held in sorted(holders.items())]
    counts = {(one.tokens, one.query_rows, one.output_rows, one.weighted_tokens) for one in joined}
    if len(counts) != 1:
        raise ComputeFailed.incomplete(f"KV heads saw different numbers of rows: {sorted(counts)}")
    sums = {
        name: torch.cat([getattr(one, name) for one in joined])
        for name in (*ROW_SUMS, *WEIGHTED_SUMS)
    }
    weights = [one.wo for one in joined if one.wo is not None]
    return replace(
        joined[0],
        **sums,
        heads=tuple(sorted(holders)),
        wo=torch.cat(weights) if len(weights) == len(joined) else None,
    )


def _join_replicas(head: int, held: Sequence[tuple[LayerMoments, int]]) -> LayerMoments:
    """One KV head from the ranks that hold it.

    Sums over keys and values are taken once; sums over query heads are added.
    """
    parts = [_one_head(part, position) for part, position in held]
    first = parts[0]
    for part in parts[1:]:
        if part.tokens != first.tokens or part.weighted_tokens != first.weighted_tokens:
            raise ComputeFailed.incomplete(
                f"ranks saw {first.tokens} and {part.tokens} tokens of KV head {head}"
            )
        if not all(same(getattr(first, name), getattr(part, name)) for name in _KEY_VALUE_SUMS):
            raise ComputeFailed.incomplete(
                f"ranks that share KV head {head} saw different keys or values"
            )
        rows = first.query_rows + part.query_rows
        for name in WEIGHTED_SUMS:
            mine, theirs = (
                getattr(first, name) * first.query_rows,
                getattr(part, name) * part.query_rows,
            )
            setattr(first, name, (mine + theirs) / max(rows, 1))
        first.qq += part.qq
        first.oo += part.oo
        first.wo = None if first.wo is None or part.wo is None else first.wo + part.wo
        first.query_rows = rows
        first.output_rows += part.output_rows
    return first


def _one_head(layer: LayerMoments, position: int) -> LayerMoments:
    """A copy of one head, on the CPU."""
    sums = {
        name: getattr(layer, name)[position : position + 1].to("cpu", copy=True)
        for name in (*ROW_SUMS, *WEIGHTED_SUMS)
    }
    return replace(
        layer,
        **sums,
        heads=(layer.heads[position],),
        wo=None if layer.wo is None else layer.wo[position : position + 1].to("cpu", copy=True),
    )
