"""An INT2 server in one process, on transformers: chunks, decode steps and prefix hits, one request
at a time.

The rows of a request outlive it, so that a later request can take its prefix from there, as from
SGLang's prefix cache: as INT2, but for a ring that is taken over. The first tokens are shared
uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedLayer
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel

TIE = 0.03
"""Two tokens whose logits differ by less may change places."""


@dataclass
class Served:
    """One request: its tokens, and per layer what the cache holds of them,
    `[2, 1, heads, tokens, d]`.

    `margins[i]` is by how much the logit of answer token `i` leads over the second best.
    """

    ids: list[int]
    prompt: int
    own_from: int = 0
    margins: list[float] = field(default_factory=list)
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def answer(self) -> list[int]:
        """Generated tokens."""
        return self.ids[self.prompt :]


class ReferenceServer:
    """Greedy generation with chunks of `chunk` tokens."""

    def __init__(self, model: LoadedModel, spec: CacheSpec, chunk: int) -> None:
        self.model, self.spec, self.chunk = model, spec, chunk
        self.sink, self.recent = spec.recipe.windows.sink, spec.recipe.windows.recent
        geometry = model.block.geometry
        self.layers = {
            i: SimulatedLayer(spec, geometry, i, model.device) for i in geometry.attention_layers
        }

    def generate(
        self,
        ids: Sequence[int],
        new: int,
        donor: Served | None = None,
        cached: int = 0,
        ring_from: int | None = None,
    ) -> Served:
        """Serve a prompt whose first `cached` tokens are taken from `donor`, those from `ring_from`
        on with its ring."""
        served = Served(list(ids), len(ids), cached if ring_from is None else ring_from)
        if donor is not None:
            assert donor.ids[:cached] == served.ids[:cached]
            served.rows = {
                i: (k[..., :cached, :], v[..., :cached, :]) for i, (k, v) in donor.rows.items()
            }
        start, token, margin = cached, -1, 0.0
        while start < len(ids):
            end = min(start + self.chunk, len(ids))
            token, margin = self._step(served, start, end, decode=False)
            start = end
        for step in range(new):
            served.ids.append(token)
            served.margins.append(margin)
            if donor is not None and step == 1:
                self._adopt(served, donor)
            # Also after the last one: overlapped scheduling decodes a finished request once more,
            # and its last token is then in the cache for the next turn.
            token, margin = self._step(served, len(served.ids) - 1, len(served.ids), decode=True)
        return served

    @staticmethod
    def _adopt(served: Served, donor: Served) -> None:
        """Read the codes of the donor where it has the same tokens, as SGLang does once prefill
        went into its tree.

        The tree keeps the slots it has and frees the ones of the tail that was prefilled again.
        With overlapped scheduling the first decode step is on its way by then and still reads its
        own.
        """
        pairs = zip(served.ids[: served.prompt], donor.ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for rows, kept in ((served.rows[i], donor.rows[i]) for i in served.rows):
            for mine, theirs in zip(rows, kept, strict=True):
                mine[1, ..., :same, :] = theirs[1, ..., :same, :]

    def _step(self, served: Served, start: int, end: int, *, decode: bool) -> tuple[int, float]:
        def attention(
            layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
        ) -> Tensor:
            layer = self.layers[layer_id]
            new = layer.encode(key, value)
            old = served.rows.get(layer_id, tuple(x[..., :0, :] for x in new))
            whole = tuple(torch.cat(pair, 3) for pair in zip(old, new, strict=True))
            served.rows[layer_id] = whole
            tier = self._tier(served, start, end, decode=decode)
            k, v = (torch.where(tier[:, None], x[1], x[0]) for x in whole)
            mask = torch.arange(end) <= torch.arange(start, end)[:, None]
            return layer.attend(query, k, v, mask, softmax)

        with torch.no_grad(), attention_scope(self.model, attention):
            ids = torch.tensor([served.ids[start:end]])
            logits = self.model.model(
                ids, position_ids=torch.arange(start, end)[None], use_cache=False
            ).logits
        best = logits[0, -1].topk(2)
        return int(best.indices[0]), float(best.values[0] - best.values[1])

    def _tier(self, served: Served, start: int, end: int, *, decode: bool) -> Tensor:
        """`[end]`: 1 where a query of this step reads INT2, 0 where it reads the window or its own
        chunk."""
        at = torch.arange(end)
        cached = end if decode else start
        window = (at < self.sink) | (at >= cached - self.recent)
        foreign = (at >= self.sink) & (at < served.own_from)
        return (foreign | ~window) & (at < cached)


def equal_tokens(got: Sequence[int], want: Served) -> int:
    """How many leading tokens agree; the first that does not must be one between two equally likely
    tokens.

    Float32 differs between two implementations of a model in the last bits. Where that carries a
    value over the rounding tie of a code, logits move by about 0.01.
    """
    for i, (token, wanted) in enumerate(zip(got, want.answer, strict=True)):
        if token != wanted:
            assert want.margins[i] < TIE, (
                f"token {i}: {token}, not {wanted}, which leads by {want.margins[i]:.3f}"
            )
            return i
    return len(got)
