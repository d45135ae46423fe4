"""What a task is: token sequences, and a number that adds up over them. How far a cache moves what
the model says next is measured here too.

A task is built once and measured under several caches, so every cache sees the same tokens. The
sums of each sequence are kept, so two caches can be compared sequence by sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from oscar_zoo.evaluate.simulated_cache import CacheSpec, Simulated, SimulatedCache
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.layer_replay import (
    Entangled,
    ReplayPlan,
    ReplayState,
    advance_together,
    known_plan,
    run_by_layer,
)
from oscar_zoo.models.loading import LoadedModel

LOSS_BLOCK = 256
MAX_BYTES = 1 << 30
"""Of exact log-probabilities, over all prompts: 3,533 positions with a vocabulary of 151,936."""
Part = tuple[float, int]
"""Sum and number of the values of one prompt."""
Tick = Callable[[], None]


def _silent() -> None: ...


@dataclass(frozen=True)
class TaskPrompt:
    """One sequence that starts at position 0: `ids`, `[T]` int64; `scored`, `[n]` int64, ascending,
    are the positions whose predictions (of the next token) the task looks at; both are in main
    memory. `answers` are stretches of `scored`, `[first, last)`, that belong to one answer."""

    ids: Tensor
    scored: Tensor
    answers: tuple[tuple[int, int], ...] = ()

    @property
    def targets(self) -> Tensor:
        """`[n]` int64: the true next tokens at the scored positions."""
        return self.ids[self.scored + 1]


def losses(prompt: TaskPrompt, logits: Tensor) -> Tensor:
    """`[n]` float64: negative log-likelihoods of the true next tokens in nats, from `[n,
    vocabulary]`, which become float32 block by block, to save memory."""
    wanted = prompt.targets.to(logits.device)
    blocks = zip(logits.split(LOSS_BLOCK), wanted.split(LOSS_BLOCK), strict=True)
    found = [
        torch.nn.functional.cross_entropy(block.float(), target, reduction="none").double()
        for block, target in blocks
    ]
    return torch.cat(found).cpu()


def right(prompt: TaskPrompt, logits: Tensor) -> Tensor:
    """`[n]` bool: whether the true next token is the most likely one."""
    return (logits.argmax(-1) == prompt.targets.to(logits.device)).cpu()


class Task(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def prompts(self) -> Sequence[TaskPrompt]: ...

    def count(self, prompt: TaskPrompt, logits: Tensor) -> Part:
        """What to average over one prompt, from `[n, vocabulary]` at its scored positions."""

    def result(self, total: float, number: int) -> float:
        """The reported number, from the sums over all prompts."""

    def describe(self) -> Mapping[str, int | str]:
        """Facts that a reader needs to repeat the measurement."""


@dataclass(frozen=True)
class Measurement:
    """A task under one cache: its result over all prompts, and `(sum, number)` of every prompt."""

    value: float
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, task: Task, parts: Sequence[Part]) -> Measurement:
        totals, numbers = zip(*parts, strict=True)
        return cls(task.result(sum(totals), sum(numbers)), tuple(parts))


def mean_of(parts: Sequence[Part]) -> Measurement:
    """The divergence per position, from the sums of every prompt."""
    totals, numbers = zip(*parts, strict=True)
    return Measurement(math.fsum(totals) / sum(numbers), tuple(parts))


def measure(
    model: LoadedModel, task: Task, cache: Simulated | None = None, *, tick: Tick = _silent
) -> Measurement:
    """Run every prompt of `task` through the model, with a cache to simulate at every position, or
    a BF16 cache."""
    (found,) = measure_each(model, [task], cache, tick=tick)
    return found


def measure_each(
    model: LoadedModel, tasks: Sequence[Task], cache: Simulated | None, *, tick: Tick = _silent
) -> list[Measurement]:
    found = _counted(model, tasks[0].prompts, cache, list(map(_counter, tasks)), tick)
    return [Measurement.of(task, parts) for task, parts in zip(tasks, found, strict=True)]


def measure_divergence(
    model: LoadedModel, exact: ExactPredictions, cache: Simulated, *, tick: Tick = _silent
) -> Measurement:
    """The divergence of a cache, in nats per position; its parts are those of the prompts."""
    (parts,) = _counted(model, exact.prompts, cache, [exact.part], tick)
    return mean_of(parts)


def measure_both(
    model: LoadedModel,
    task: Task,
    exact: ExactPredictions,
    cache: Simulated | None,
    *,
    tick: Tick = _silent,
) -> tuple[Measurement, Measurement]:

    def diverge(number: int, logits: Tensor) -> Part:
        scored, sampled = task.prompts[number].scored, exact.prompts[number].scored
        places = torch.searchsorted(scored, sampled).to(logits.device)
        return exact.part(number, logits if len(sampled) == len(scored) else logits[places])

    counted, parts = _counted(model, task.prompts, cache, [_counter(task), diverge], tick)
    return Measurement.of(task, counted), mean_of(parts)


def _counter(task: Task) -> Callable[[int, Tensor], Part]:
    return lambda number, logits: task.count(task.prompts[number], logits)


def _counted(
    model: LoadedModel,
    prompts: Sequence[TaskPrompt],
    cache: Simulated | None,
    counters: Sequence[Callable[[int, Tensor], Part]],
    tick: Tick,
) -> list[list[Part]]:
    found: list[list[Part]] = [[] for _ in counters]
    with simulating(model, cache):
        for number, logits in enumerate(all_logits(model, prompts)):
            for parts, counter in zip(found, counters, strict=True):
                parts.append(counter(number, logits))
            tick()
    return found


@contextmanager
def simulating(model: LoadedModel, cache: Simulated | None) -> Iterator[None]:
    """Run the model with a simulated cache, and without gradients, while the block is open."""
    with ExitStack() as stack:
        if cache is not None:
            simulated = SimulatedCache(cache, model.block, model.device)
            stack.enter_context(attention_scope(model, simulated))
        stack.enter_context(torch.inference_mode())
        yield


def all_logits(model: LoadedModel, prompts: Sequence[TaskPrompt]) -> Iterator[Tensor]:
    """`[n, vocabulary]` at the scored positions of each prompt, in order. All prompts go through
    one layer before the next when the weights are read layer by layer."""
    if not model.streamed:
        yield from (logits_of(model, prompt) for prompt in prompts)
        return
    ids = [prompt.ids for prompt in prompts]
    yield from run_by_layer(
        model.model, model.block.num_layers, ids, lambda number: logits_of(model, prompts[number])
    )


def logits_of(model: LoadedModel, prompt: TaskPrompt) -> Tensor:
    """`[n, vocabulary]` at the scored positions, from one pass of the model."""
    ids, first = prompt.ids[None].to(model.device), int(prompt.scored[0])
    # On several devices, positions would have to be on that of the last layer.
    keep = ids.shape[1] - first if model.spread else prompt.scored.to(model.device)
    found: Tensor = model.model(ids, use_cache=False, logits_to_keep=keep).logits[0]
    return found[(prompt.scored - first).to(found.device)] if model.spread else found


@dataclass(frozen=True)
class ExactPredictions:
    """What a model says with the exact cache: per prompt, whose `scored` positions are those of the
    sample, `[n, vocabulary]` float16.

    The divergence of a cache is `sum(p * (log p - log q))` over the vocabulary, in nats per
    position, with `p` what the model says with the exact cache and `q` with another one. Gains and
    losses cancel in perplexity, and never here, so it tells caches apart on much less text. As
    float16 the sample adds 2e-7 nats to the divergence of every cache on the example model, where
    bfloat16 would add 1e-5, and codes of 4 bits give 9e-4.
    """

    prompts: tuple[TaskPrompt, ...]
    log_probabilities: tuple[Tensor, ...]

    def between(self, first: int, last: int) -> ExactPredictions:
        return ExactPredictions(self.prompts[first:last], self.log_probabilities[first:last])

    @property
    def positions(self) -> int:
        return sum(len(prompt.scored) for prompt in self.prompts)

    def part(self, number: int, logits: Tensor) -> Part:
        """Summed divergence over the positions of a prompt, in nats, and how many they are, from
        `[n, vocabulary]` with another cache."""
        found = self.divergences(number, logits)
        return float(found.sum()), len(found)

    def divergences(self, number: int, logits: Tensor) -> Tensor:
        """The same of each position, `[n]` float64 in main memory."""
        exact, found = self.log_probabilities[number], []
        for block, said in zip(exact.split(LOSS_BLOCK), logits.split(LOSS_BLOCK), strict=True):
            # Rounding took them off the sum of 1, without which this would not be a divergence.
            p = block.to(said.device).float().log_softmax(-1)
            difference = p - said.float().log_softmax(-1)
            # A token that is impossible with both caches says nothing.
            terms = torch.where(p.isneginf(), 0.0, p.exp() * difference)
            found.append(terms.sum(-1).double().cpu())
        return torch.cat(found)


def room_for(model: LoadedModel, max_bytes: int) -> int:
    """Positions at which `max_bytes` hold what a model says, as `ExactPredictions` does."""
    width: int = model.model.get_output_embeddings().weight.shape[0]
    return max_bytes // (2 * width)


def exact_predictions(
    model: LoadedModel,
    prompts: Sequence[TaskPrompt],
    *,
    max_bytes: int = MAX_BYTES,
    tick: Tick = _silent,
) -> ExactPredictions:
    """Run prompts with the exact cache and keep what the model says. Scored positions are thinned
    out evenly until `max_bytes` suffice; at least one stays in each prompt."""
    room = max(room_for(model, max_bytes), len(prompts))
    share = min(1.0, room / sum(len(prompt.scored) for prompt in prompts))
    sampled = tuple(_thinned(prompt, share) for prompt in prompts)
    place, kept = torch.device("cpu"), []
    if model.device.type == "cuda" and not model.streamed:
        free, _ = torch.cuda.mem_get_info(model.device)
        if free >= 4 * max_bytes:  # which leaves three times as much to compute with
            place = model.device
    with simulating(model, None):
        for logits in all_logits(model, sampled):
            blocks = [
                block.float().log_softmax(-1).half().to(place) for block in logits.split(LOSS_BLOCK)
            ]
            kept.append(torch.cat(blocks))
            tick()
    return ExactPredictions(sampled, tuple(kept))


def _thinned(prompt: TaskPrompt, share: float) -> TaskPrompt:
    """A share of the scored positions of a prompt, evenly spaced; answers are of no interest."""
    number = max(1, math.floor(share * len(prompt.scored)))
    places = torch.arange(number, device="cpu") * len(prompt.scored) // number
    return replace(prompt, scored=prompt.scored[places], answers=())


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
    """The divergence of every changed cache, as `measure_divergence` finds it.

    Up to its layer, such a cache computes what the common one does. So every sequence runs through
    the model with the common cache, and at each layer it branches off into the caches that differ
    there: half the work of whole passes. Where weights are read layer by layer, a layer is read
    once for all branches that are in memory together.
    """
    cache = SimulatedCache(common, model.block, model.device)
    branching = _Branching(model, exact.prompts, changes, cache)
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


@dataclass
class _Branching:
    """A function for `attention_scope`, with the cache that counts just now."""

    model: LoadedModel
    prompts: Sequence[TaskPrompt]
    changes: Sequence[Change]
    cache: SimulatedCache

    def __call__(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        return self.cache(layer_id, query, key, value, softmax)

    def run(self, plan: ReplayPlan) -> Iterator[tuple[int, int, Tensor]]:
        """Yields `(number of the change, number of the prompt, logits)` for each of them."""
        prompts = range(len(self.prompts))
        # Weights that are read for every layer are worth more than room for hidden states.
        rounds = [tuple(prompts)] if self.model.streamed else [(one,) for one in prompts]
        for numbers in rounds:
            tokens = sum(len(self.prompts[number].ids) for number in numbers)
            # As many changes as have room beside the common cache.
            at_once = max(1, BRANCH_BYTES // (tokens * plan.hidden_bytes) - 1)
            for first in range(0, len(self.changes), at_once):
                chosen = range(first, min(first + at_once, len(self.changes)))
                yield from self._together(plan, chosen, numbers)

    def _together(
        self, plan: ReplayPlan, changes: Sequence[int], prompts: Sequence[int]
    ) -> Iterator[tuple[int, int, Tensor]]:
        trunks = {n: plan.prepare(self._decode, self.prompts[n].ids.tolist()) for n in prompts}
        branches: dict[tuple[int, int], ReplayState] = {}
        for index, layer in enumerate(plan.layers):
            grown = self._grow(trunks, [n for n in changes if self.changes[n][0] == index], layer)
            if all(self.changes[n][0] <= index for n in changes):
                trunks = {}  # nothing branches off any more
            for number in prompts:
                alike = [state for (_, other), state in branches.items() if other == number]
                self._advance([*([trunks[number]] if trunks else []), *alike], layer, index)
            branches |= grown
        for (change, number), state in branches.items():
            whole = partial(logits_of, self.model, self.prompts[number])
            state.hidden = state.hidden.to(self.model.device)
            yield change, number, plan.finish(whole, state)

    def _decode(self, ids: Sequence[int]) -> None:
        given = torch.tensor([list(ids)], device=self.model.device)
        self.model.model.base_model(input_ids=given, use_cache=False)

    def _grow(
        self, trunks: dict[int, ReplayState], changes: Sequence[int], layer: nn.Module
    ) -> dict[tuple[int, int], ReplayState]:
        """New branches behind `layer`, where `changes` begin to differ."""
        found, common = {}, self.cache
        for change in changes:
            index, spec = self.changes[change]
            self.cache = common.with_layer_of(spec, index)
            for number, trunk in trunks.items():
                found[change, number] = branch = ReplayState(trunk.hidden, trunk.calls)
                self._advance([branch], layer, index)
        self.cache = common
        return found

    def _advance(self, states: Sequence[ReplayState], layer: nn.Module, index: int) -> None:
        """Run one layer over states of the same prompt; those of all prompts together wait in main
        memory."""
        if not self.model.streamed:
            tokens = BATCH_TOKENS.get(self.model.device.type, 0)
            advance_together(states, layer, index, most_tokens=tokens)
            return
        for state in states:
            state.hidden = state.hidden.to(self.model.device)
            state.advance(layer, index)
            state.hidden = state.hidden.cpu()
