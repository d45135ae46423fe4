"""Log-probabilities of a text as a server with an INT2 cache computes them, chunk by chunk.

Attention inside a chunk is exact and older tokens are read as INT2. The value of a position
therefore depends on where chunks end, and on how much of the text was a prefix-cache hit.
`simulated_cache.SimulatedCache` has no chunks; `generate` continues a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.generate import GenerationRequest
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel


def prefill_log_probabilities(
    model: LoadedModel,
    ids: Sequence[int],
    *,
    cache: CacheSpec | None,
    chunk_size: int,
    hit: int = 0,
    sinks: bool = True,
) -> tuple[float, ...]:
    """Natural log-probabilities of the tokens `hit + 1 ..`, each given all tokens before it.

    Args:
        ids: at least two tokens, from position 0.
        cache: the INT2 cache; `None` for an exact one.
        chunk_size: tokens prefilled at once.
        hit: this many tokens were cached by an earlier request, in chunks of the same size; the
            rest is prefilled.
        sinks: whether the first tokens are still exact after the hit.
    """
    if len(ids) < 2 or chunk_size < 1 or not 0 <= hit < len(ids) - 1:
        raise UsageError(
            f"{len(ids)} tokens, {hit} of them cached, cannot be scored in chunks of {chunk_size}."
        )
    request, tokens = (
        GenerationRequest(model, cache),
        torch.tensor(list(ids), dtype=torch.int64, device="cpu"),
    )
    for first, last in _chunks(0, hit, chunk_size):
        request.extend(tokens[first:last])
    if hit:
        request.begin_from_cache(sinks=sinks)
    found: list[torch.Tensor] = []
    for first, last in _chunks(hit, len(ids), chunk_size):
        logits = request.extend(tokens[first:last])
        wanted = tokens[first + 1 : last + 1].to(logits.device)
        logits = logits[: len(wanted)].float()
        found.append((logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)).double().cpu())
    return tuple(torch.cat(found).tolist())


def _chunks(first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Stretches `[a, b)` of at most `size` positions from `first` on."""
    return ((a, min(a + size, end)) for a in range(first, end, size))
