"""Greedy generation as a server with an INT2 cache does it.

The prompt is prefilled in chunks, then tokens come one at a time. A chunk reads its own tokens
exactly and older ones as the cache holds them at that moment, so results depend on where chunks
end. `simulated_cache.SimulatedCache` is the other extreme: every position reads like a decoded one.
K and V are kept here instead of in a `transformers` cache, and the model sees only the new tokens
and their positions. A model with other layers too, such as Mamba or sliding windows, sees the whole
sequence every time, because what those layers keep is not kept here; what its full-attention layers
computed for older tokens is kept and put in again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

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
    new: list[int] = []
    while True:
        new.append(int(logits.argmax()))
        if len(new) == max_new_tokens:
            return new
        logits = request.decode(new[-1])


class GenerationRequest:
    """One sequence in a server: its cached rows, layer by layer. A `cache` of `None` is exact."""

    def __init__(self, model: LoadedModel, cache: CacheSpec | None) -> None:
        block = model.block
        self._model = model
        self._windows = None if cache is None else cache.recipe.windows
        self._layers: dict[int, _Layer]
        if cache is None:
            self._layers = dict.fromkeys(block.attention_layers, _ExactLayer())
        else:
            cache.check(block)
            self._layers = {
                i: SimulatedLayer(cache, block, i, model.device) for i in block.attention_layers
            }
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._older = None if only_attention(model) else _OlderTokens()
        self._length = 0
        self._own_from = 0
        self._sinks = True

    def begin_from_cache(self, *, sinks: bool = True) -> None:
        """Start a new request that found all tokens so far in the prefix cache.

        Its recent window holds nothing that came before. Its first tokens stay exact, because
        requests share them; `sinks` false is a server that has lost them.
        """
        self._own_from, self._sinks = self._length, sinks

    def extend(self, ids: Tensor) -> Tensor:
        """Prefill one chunk, `[T]` int64; returns logits `[T, vocabulary]` of all its positions."""
        return self._forward(ids, cached=self._length)

    def decode(self, token: int) -> Tensor:
        """Process one generated token, which is written to the cache before it is read; returns
        logits `[vocabulary]`."""
        return self._forward(torch.tensor([token], device="cpu"), cached=self._length + 1)[0]

    def _forward(self, ids: Tensor, *, cached: int) -> Tensor:
        new = len(ids)
        positions = torch.arange(self._length, self._length + new, device=self._model.device)
        stretches, mask = self._reads(positions, cached)

        def attention(
            layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
        ) -> Tensor:
            layer = self._layers[layer_id]
            rows = layer.encode(key[..., -new:, :], value[..., -new:, :])
            if layer_id in self._stored:
                old = self._stored[layer_id]
                rows = torch.cat([old[0], rows[0]], -2), torch.cat([old[1], rows[1]], -2)
            self._stored[layer_id] = rows
            output = layer.attend(
                query[..., -new:, :],
                take_rows(rows[0], stretches),
                take_rows(rows[1], stretches),
                mask,
                softmax,
            )
            return output if self._older is None else self._older.with_outputs(layer_id, output)

        if self._older is not None:
            ids = self._older.with_ids(ids)
            positions = torch.arange(len(ids), device=self._model.device)
        with attention_scope(self._model, attention), torch.inference_mode():
            logits: Tensor = self._model.model(
                ids[None].to(self._model.device), position_ids=positions[None], use_cache=False
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


class _OlderTokens:
    """What a model that sees its whole sequence again needs of the tokens before the new ones."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._outputs: dict[int, Tensor] = {}

    def with_ids(self, new: Tensor) -> Tensor:
        """All tokens, `[T]`."""
        self._ids = torch.cat([self._ids, new])
        return self._ids

    def with_outputs(self, layer_id: int, new: Tensor) -> Tensor:
        """What attention of a layer gives for all tokens, `[1, num_q_heads, T, v_head_dim]`."""
        old = self._outputs.get(layer_id)
        self._outputs[layer_id] = new if old is None else torch.cat([old, new], -2)
        return self._outputs[layer_id]


class _Layer(Protocol):
    """The layer interface of `GenerationRequest`; see `simulated_cache.SimulatedLayer`."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax: Softmax
    ) -> Tensor: ...


class _ExactLayer:
    """No transform, no quantization, one tier, attention in the model's dtype."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key[None], value[None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax: Softmax
    ) -> Tensor:
        return attend(query, key, value, mask, softmax)


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
    server with a cache computes them chunk by chunk; a `cache` of `None` is exact.

    Attention inside a chunk is exact and older tokens are read as INT2. The value of a position
    therefore depends on where chunks end, and on how much of the text was a prefix-cache hit: `hit`
    tokens were cached by an earlier request, in chunks of the same size. `sinks` says whether the
    first tokens are still exact after it.
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
