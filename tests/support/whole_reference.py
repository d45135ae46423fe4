"""An INT2 server simulated over whole sequences, for models with any kinds of layers.

Every step runs the model over all tokens again, so layers that keep a state need no code here. A
position reads the cache as it was when a server processed that position: at the end of an earlier
chunk, or one token ago.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_cases
import torch
from engines import CHUNK
from reference_server import Served, equal_tokens
from torch import Tensor

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedLayer
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel, load_model

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
    """Of the model and the rotation that `engine_cases` serves for `family`.

    Args:
        family: of a small random model.
        folder: where both are written.
    """
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
    """The part of the tokens of `engine_cases.one_at_a_time` that equal the reference's.

    Args:
        groups: what a server made of them.
        reference: of its model.
        donors: what the reference made of the prompts.

    Raises:
        AssertionError: a token differs that the reference prefers clearly.
    """
    new = engine_cases.NEW
    equal = sum(
        equal_tokens(groups[f"new{i}"]["tokens"][0], donor) for i, donor in enumerate(donors)
    )
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
