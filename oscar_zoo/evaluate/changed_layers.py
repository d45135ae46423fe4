"""The divergence of many caches that differ from one cache in a single layer each.

Up to its layer, such a cache computes what the common one does. So every sequence runs through the
model with the common cache, and at each layer it branches off into the caches that differ there:
half the work of whole passes. Where weights are read layer by layer, a layer is read once for all
branches that are in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    logits_of,
    mean_of,
    measure_divergence,
)
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.layer_replay import (
    Entangled,
    ReplayPlan,
    ReplayState,
    advance_together,
    known_plan,
)
from oscar_zoo.models.loading import LoadedModel

BRANCH_BYTES = 8 << 30
"""Most bytes of hidden states that wait for their next layer together."""
BATCH_TOKENS = {"cuda": 8192}
"""Tokens that run through a layer together, by device: one sequence does not keep a GPU busy."""
Change = tuple[int, CacheSpec]
"""A decoder layer, and a cache that differs from the common one only there."""


def divergences_of_changes(
    model: LoadedModel,
    exact: ExactPredictions,
    common: CacheSpec,
    changes: Sequence[Change],
    *,
    tick: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """The divergence of every changed cache, as `measure_divergence` finds it."""
    branching = _Branching(model, exact, common, changes)
    try:
        if model.spread:  # the arguments of a layer belong to its device
            raise Entangled
        with attention_scope(model, branching), torch.inference_mode():
            plan = known_plan(model.model, model.block.num_layers, exact.prompts[0].ids)
            if plan is None:
                raise Entangled
            parts = [[(0.0, 0)] * len(exact.prompts) for _ in changes]
            for number, prompt, logits in branching.run(plan):
                parts[number][prompt] = exact.part(prompt, logits)
                tick()
    except Entangled:
        return [measure_divergence(model, exact, spec, tick=tick) for _, spec in changes]
    return [mean_of(one) for one in parts]


class _Branching:
    """The run of a model over prompts with a common cache and its changes; a function for
    `attention_scope`, with the cache that counts just now."""

    def __init__(
        self,
        model: LoadedModel,
        exact: ExactPredictions,
        common: CacheSpec,
        changes: Sequence[Change],
    ) -> None:
        self._model, self._prompts, self._changes = model, exact.prompts, changes
        self._cache = SimulatedCache(common, model.block, model.device)

    def __call__(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        return self._cache(layer_id, query, key, value, softmax)

    def run(self, plan: ReplayPlan) -> Iterator[tuple[int, int, Tensor]]:
        """Yields `(number of the change, number of the prompt, logits)` for each of them."""
        prompts = range(len(self._prompts))
        # Weights that are read for every layer are worth more than room for hidden states.
        rounds = [tuple(prompts)] if self._model.streamed else [(one,) for one in prompts]
        for numbers in rounds:
            tokens = sum(len(self._prompts[number].ids) for number in numbers)
            # As many changes as have room beside the common cache.
            at_once = max(1, BRANCH_BYTES // (tokens * plan.hidden_bytes) - 1)
            for first in range(0, len(self._changes), at_once):
                chosen = range(first, min(first + at_once, len(self._changes)))
                yield from self._together(plan, chosen, numbers)

    def _together(
        self, plan: ReplayPlan, changes: Sequence[int], prompts: Sequence[int]
    ) -> Iterator[tuple[int, int, Tensor]]:
        trunks = {n: plan.prepare(self._decode, self._prompts[n].ids.tolist()) for n in prompts}
        branches: dict[tuple[int, int], ReplayState] = {}
        for index, layer in enumerate(plan.layers):
            grown = self._grow(trunks, [n for n in changes if self._changes[n][0] == index], layer)
            if all(self._changes[n][0] <= index for n in changes):
                trunks = {}  # nothing branches off any more
            for number in prompts:
                alike = [state for (_, other), state in branches.items() if other == number]
                self._advance([*([trunks[number]] if trunks else []), *alike], layer, index)
            branches |= grown
        for (change, number), state in branches.items():
            whole = partial(logits_of, self._model, self._prompts[number])
            state.hidden = state.hidden.to(self._model.device)
            yield change, number, plan.finish(whole, state)

    def _decode(self, ids: Sequence[int]) -> None:
        given = torch.tensor([list(ids)], device=self._model.device)
        self._model.model.base_model(input_ids=given, use_cache=False)

    def _grow(
        self, trunks: dict[int, ReplayState], changes: Sequence[int], layer: nn.Module
    ) -> dict[tuple[int, int], ReplayState]:
        """New branches behind `layer`, where `changes` begin to differ."""
        found, common = {}, self._cache
        for change in changes:
            index, spec = self._changes[change]
            self._cache = common.with_layer_of(spec, index)
            for number, trunk in trunks.items():
                found[change, number] = branch = ReplayState(trunk.hidden, trunk.calls)
                self._advance([branch], layer, index)
        self._cache = common
        return found

    def _advance(self, states: Sequence[ReplayState], layer: nn.Module, index: int) -> None:
        """Run one layer over states of the same prompt; those of all prompts together wait in main
        memory."""
        if not self._model.streamed:
            tokens = BATCH_TOKENS.get(self._model.device.type, 0)
            advance_together(states, layer, index, most_tokens=tokens)
            return
        for state in states:
            state.hidden = state.hidden.to(self._model.device)
            state.advance(layer, index)
            state.hidden = state.hidden.cpu()
