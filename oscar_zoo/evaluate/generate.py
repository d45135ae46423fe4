"""Greedy generation as a server with an INT2 cache does it.

The prompt is prefilled in chunks, then tokens come one at a time. A chunk reads its own tokens
exactly and older ones as the cache holds them at that moment, so results depend on where chunks
end; with `simulated_cache.SimulatedCache` every position reads like a decoded one. The model sees
only the new tokens and their positions. One with other layers too, such as Mamba or sliding
windows, sees the whole sequence every time; what its full-attention layers computed for older
tokens is kept and put in again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.simulated_cache import (
    STORED,
    WINDOW,
    CacheSpec,
    SimulatedLayer,
    Stretches,
    take_rows,
)
from oscar_zoo.models.attention import Softmax, attend, attention_scope
from oscar_zoo.models.loading import LoadedModel


def greedy_generate(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    *,
    cache: CacheSpec | None,
    max_new_tokens: int,
    chunk_size: int,
) -> list[int]:
    """The `max_new_tokens` most likely tokens behind a prompt, which is prefilled in chunks of
    `chunk_size` tokens. A `cache` of `None` is exact."""
    request = GenerationRequest(model, cache)
    ids = torch.tensor(list(prompt_ids), dtype=torch.int64, device="cpu")
    logits = torch.empty(0, device="cpu")
    for first, last in _chunks(0, len(ids), chunk_size):
        logits = request.extend(ids[first:last])[-1]
    new = [int(logits.argmax())]
    while len(new) < max_new_tokens:
        new.append(int(request.decode(new[-1]).argmax()))
    return new


def prefill_log_probabilities(
    model: LoadedModel,
    ids: Sequence[int],
    *,
    cache: CacheSpec | None,
    chunk_size: int,
    hit: int = 0,
    sinks: bool = True,
) -> tuple[float, ...]:
    """Natural log-probabilities of the tokens `hit + 1 ..`, each given all tokens before it, as a
    server with a cache computes them chunk by chunk; a `cache` of `None` is exact. `hit` tokens
    were cached by an earlier request, in chunks of the same size, and `sinks` says whether the
    first tokens are still exact after it."""
    if len(ids) < 2 or chunk_size < 1 or not 0 <= hit < len(ids) - 1:
        raise UsageError(
            f"{len(ids)} tokens, {hit} of them cached, cannot be scored in chunks of {chunk_size}."
        )
    request = GenerationRequest(model, cache)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device="cpu")
    for first, last in _chunks(0, hit, chunk_size):
        request.extend(tokens[first:last])
    if hit:
        request.begin_from_cache(sinks=sinks)
    found: list[Tensor] = []
    for first, last in _chunks(hit, len(ids), chunk_size):
        logits = request.extend(tokens[first:last])
        wanted = tokens[first + 1 : last + 1].to(logits.device)
        logits = logits[: len(wanted)].float()
        found.append((logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)).double().cpu())
    return tuple(torch.cat(found).tolist())


def _chunks(first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + size, end)) for a in range(first, end, size))


class GenerationRequest:
    """One sequence in a server. A `cache` of `None` is exact."""

    def __init__(self, model: LoadedModel, cache: CacheSpec | None) -> None:
        block = model.block
        self._model, self._whole = model, not only_attention(model)
        self._windows = None if cache is None else cache.recipe.windows
        if cache is not None:
            cache.check(block)
        self._layers = {
            i: _ExactLayer() if cache is None else SimulatedLayer(cache, block, i, model.device)
            for i in block.attention_layers
        }
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._outputs: dict[int, Tensor] = {}
        """What attention gave for all tokens so far, where the model sees them all again."""
        self._length = 0
        self._own_from = 0
        self._sinks = True

    def begin_from_cache(self, *, sinks: bool = True) -> None:
        """Start a new request that found all tokens so far in the prefix cache. Its recent window
        holds nothing that came before. Its first tokens stay exact, because requests share them;
        `sinks` false is a server that has lost them."""
        self._own_from, self._sinks = self._length, sinks

    def extend(self, ids: Tensor) -> Tensor:
        """Prefill one chunk, `[T]` int64; returns logits `[T, vocabulary]` of all its positions."""
        return self._forward(ids, cached=self._length)

    def decode(self, token: int) -> Tensor:
        """Process one generated token, which is written to the cache before it is read; returns
        logits `[vocabulary]`."""
        return self._forward(torch.tensor([token], device="cpu"), cached=self._length + 1)[0]

    def _forward(self, ids: Tensor, *, cached: int) -> Tensor:
        new, device = len(ids), self._model.device
        positions = torch.arange(self._length, self._length + new, device=device)
        stretches, mask = self._reads(positions, cached)

        def attention(
            layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
        ) -> Tensor:
            layer = self._layers[layer_id]
            rows = layer.encode(key[..., -new:, :], value[..., -new:, :])
            if layer_id in self._stored:
                k, v = self._stored[layer_id]
                rows = torch.cat([k, rows[0]], -2), torch.cat([v, rows[1]], -2)
            self._stored[layer_id] = rows
            read = take_rows(rows[0], stretches), take_rows(rows[1], stretches)
            output = layer.attend(query[..., -new:, :], *read, mask, softmax)
            if self._whole:
                old = self._outputs.get(layer_id)
                output = output if old is None else torch.cat([old, output], -2)
                self._outputs[layer_id] = output
            return output

        if self._whole:
            ids = self._ids = torch.cat([self._ids, ids])
            positions = torch.arange(len(ids), device=device)
        with attention_scope(self._model, attention), torch.inference_mode():
            logits: Tensor = self._model.model(
                ids[None].to(device), position_ids=positions[None], use_cache=False
            ).logits[0, -new:]
        self._length += new
        return logits

    def _reads(self, positions: Tensor, cached: int) -> tuple[Stretches, Tensor]:
        """The rows that new tokens read when `cached` tokens are in the cache, and a mask of which
        token reads which row, `[T, R]`."""
        end = int(positions[-1]) + 1
        stretches: Stretches = ((WINDOW, 0, end),)
        if self._windows is not None:
            sinks = min(self._windows.sink, cached) if self._sinks else 0
            ring = max(sinks, cached - self._windows.recent, self._own_from)
            stretches = (WINDOW, 0, sinks), (STORED, sinks, ring), (WINDOW, ring, end)
        s = torch.cat(
            [torch.arange(first, last, device=positions.device) for _, first, last in stretches]
        )
        return stretches, s <= positions[:, None]


def only_attention(model: LoadedModel) -> bool:
    """Whether full attention is all that connects the tokens of this model."""
    kinds = getattr(model.model.config.get_text_config(), "layer_types", None) or ()
    whole = len(model.block.attention_layers) == model.block.num_layers
    return whole and "hybrid" not in kinds  # such a layer of Falcon-H1 has attention and a state


class _ExactLayer:
    """No transform, no quantization, one tier, attention in the model's dtype."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key[None], value[None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax: Softmax
    ) -> Tensor:
        return attend(query, key, value, mask, softmax)
