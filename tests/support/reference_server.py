"""An INT2 server in one process, on transformers: chunks, decode steps and prefix hits, one request
at a time.

The rows of a request outlive it, so that a later request can take its prefix from there, as from
SGLang's prefix cache: as INT2, but for a ring that is taken over. The first tokens are shared
uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_cases
import torch
from engines import CHUNK
from torch import Tensor

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedLayer
from oscar_zoo.models.attention import AttentionFn, Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel, load_model

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

        with torch.no_grad(), self.scope(attention):
            ids = torch.tensor([served.ids[start:end]])
            logits = self.model.model(
                ids, position_ids=torch.arange(start, end)[None], use_cache=False
            ).logits
        best = logits[0, -1].topk(2)
        return int(best.indices[0]), float(best.values[0] - best.values[1])

    def scope(self, attention: AttentionFn) -> AbstractContextManager[None]:
        """While it is open, attention of the model is computed by `attention`."""
        return attention_scope(self.model, attention)

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


FIRST_POSITION = {"gemma4": 1}
"""Where SGLang begins to count positions, by family; in other families from 0. Attention does not
see it, but the codes of keys do."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of a server over the positions `[first, last)` of a sequence.

    Attributes:
        cached: tokens in the cache when these positions read it.
        own_from: the request of this pass found so many tokens in the prefix cache.
    """

    first: int
    last: int
    cached: int
    own_from: int


def reference_of(family: str, folder: Path) -> WholeReference:
    """Of the model and the rotation that `engine_cases` serves for `family`."""
    model = load_model(str(engine_cases.model(folder / family, family)), dtype="float32")
    assert model.block.geometry == engine_cases.GEOMETRIES[family]
    place = engine_cases.rotations(folder, model.block.geometry)["orthogonal"]
    recipe = Manifest.from_bytes((place / FILE_NAME).read_bytes(), what=FILE_NAME).recipe
    windows = Windows(sink=engine_cases.SINK, recent=engine_cases.RECENT)
    k, v = (read_rotation(file.read_bytes(), what=file.name) for file in sorted(place.glob("*.pt")))
    spec = CacheSpec(k, v, recipe.model_copy(update={"windows": windows}))
    return WholeReference(model, spec, CHUNK, FIRST_POSITION.get(family, 0))


def equal_answers(
    groups: Mapping[str, Any], reference: WholeReference, donors: Sequence[Served]
) -> float:
    """The part of the tokens of `engine_cases.one_at_a_time` that equal the reference's."""
    new = engine_cases.NEW
    equal = sum(equal_tokens(groups[f"new{i}"]["tokens"][0], one) for i, one in enumerate(donors))
    if "turn2" not in groups:
        return equal / (new * len(groups))
    (turn,), (cached,) = groups["turn2"]["prompts"], groups["turn2"]["cached"]
    if groups["new0"]["tokens"] == [donors[0].answer]:
        assert cached > donors[0].prompt
        second = reference.generate(turn, new, donors[0], cached)
        equal += equal_tokens(groups["turn2"]["tokens"][0], second)
    return equal / (new * len(groups))


class WholeReference:
    """Greedy generation with chunks of `chunk` tokens, whose positions count from `position`."""

    def __init__(self, model: LoadedModel, spec: CacheSpec, chunk: int, position: int = 0) -> None:
        self.model, self.windows, self.chunk = model, spec.recipe.windows, chunk
        self._position = position
        block = model.block
        self.layers = {
            i: SimulatedLayer(spec, block.geometry, i, model.device) for i in block.attention_layers
        }
        self._passes: dict[int, list[Pass]] = {}

    def generate(
        self, ids: Sequence[int], new: int, donor: Served | None = None, cached: int = 0
    ) -> Served:
        """Serve a prompt whose first `cached` tokens were processed with `donor`."""
        passes = [] if donor is None else [p for p in self._passes[id(donor)] if p.last <= cached]
        assert not passes or passes[-1].last == cached
        served = Served(list(ids), len(ids), cached)
        for first in range(cached, len(ids), self.chunk):
            passes.append(Pass(first, min(first + self.chunk, len(ids)), first, cached))
        for _ in range(new):
            token, margin = self._next(served.ids, passes)
            served.ids.append(token)
            served.margins.append(margin)
            end = len(served.ids)
            passes.append(Pass(end - 1, end, end, cached))
        self._passes[id(served)] = passes
        return served

    def _next(self, ids: list[int], passes: list[Pass]) -> tuple[int, float]:
        codes = torch.cat([self._reads_codes(one, len(ids)) for one in passes])
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        mask = torch.cat([causal & ~codes, causal & codes], 1)

        def attention(
            layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
        ) -> Tensor:
            layer = self.layers[layer_id]
            # Every token twice: uncompressed, and as INT2.
            k, v = (torch.cat([rows[0], rows[1]], -2) for rows in layer.encode(key, value))
            return layer.attend(query, k, v, mask, softmax)

        with torch.no_grad(), attention_scope(self.model, attention):
            at = torch.arange(len(ids))[None] + self._position
            logits = self.model.model(torch.tensor([ids]), position_ids=at, use_cache=False).logits
        best = logits[0, -1].topk(2)
        return int(best.indices[0]), float(best.values[0] - best.values[1])

    def _reads_codes(self, one: Pass, length: int) -> Tensor:
        """`[positions of the pass, length]`: which tokens they read as INT2."""
        at = torch.arange(length)
        first, last = at < self.windows.sink, at >= one.cached - self.windows.recent
        foreign = ~first & (at < one.own_from)
        reads = (at < one.cached) & (foreign | ~(first | last))
        return reads.expand(one.last - one.first, length)
