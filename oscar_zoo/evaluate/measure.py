"""What a task is: token sequences, and a number that adds up over them. How far a cache moves what
the model says next is measured here too.

A task is built once and measured under several caches, so every cache sees the same tokens. The
sums of each sequence are kept, so two caches can be compared sequence by sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from oscar_zoo.evaluate.simulated_cache import Simulated, SimulatedCache
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.layer_replay import run_by_layer
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
    """One sequence that starts at position 0: `ids` are `[T]` int64, in main memory; `scored`,
    `[n]` int64, there too, ascending, are the positions whose predictions (of the next token) the
    task looks at. `answers` are stretches of `scored`, `[first, last)`, that belong to one answer;
    none when each stands alone."""

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
    """Something to measure."""

    @property
    def name(self) -> str:
        """Key of the result, such as `perplexity`."""

    @property
    def prompts(self) -> Sequence[TaskPrompt]:
        """The sequences."""

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
        """From what `task.count` gave for every prompt."""
        return cls(
            task.result(sum(total for total, _ in parts), sum(n for _, n in parts)), tuple(parts)
        )


def mean_of(parts: Sequence[Part]) -> Measurement:
    """The divergence per position, from the sums of every prompt."""
    return Measurement(
        math.fsum(total for total, _ in parts) / sum(number for _, number in parts), tuple(parts)
    )


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
    """Tasks over the same prompts, from the same passes."""
    prompts = tasks[0].prompts

    def counter(task: Task) -> Callable[[int, Tensor], Part]:
        return lambda number, logits: task.count(prompts[number], logits)

    found = _counted(model, prompts, cache, [counter(task) for task in tasks], tick)
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
    """A task under a cache and the divergence of the cache, from the same passes."""

    def count(number: int, logits: Tensor) -> Part:
        return task.count(task.prompts[number], logits)

    def diverge(number: int, logits: Tensor) -> Part:
        scored, sampled = task.prompts[number].scored, exact.prompts[number].scored
        places = torch.searchsorted(scored, sampled).to(logits.device)
        return exact.part(number, logits if len(sampled) == len(scored) else logits[places])

    counted, parts = _counted(model, task.prompts, cache, [count, diverge], tick)
    return Measurement.of(task, counted), mean_of(parts)


def _counted(
    model: LoadedModel,
    prompts: Sequence[TaskPrompt],
    cache: Simulated | None,
    counters: Sequence[Callable[[int, Tensor], Part]],
    tick: Tick,
) -> list[list[Part]]:
    """What each counter finds in the logits of every prompt."""
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
    scope = (
        nullcontext()
        if cache is None
        else attention_scope(model, SimulatedCache(cache, model.block, model.device))
    )
    with scope, torch.inference_mode():
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
    position, with `p` what the model says with the exact cache and `q` with another one. Perplexity
    looks at one token of each position and gains and losses cancel in it; the divergence looks at
    all of them and is never negative, so it tells caches apart on much less text. As float16 the
    sample adds 2e-7 nats to the divergence of every cache on the example model, where bfloat16
    would add 1e-5, and codes of 4 bits give 9e-4.
    """

    prompts: tuple[TaskPrompt, ...]
    log_probabilities: tuple[Tensor, ...]

    def between(self, first: int, last: int) -> ExactPredictions:
        """Those of the prompts `first` to `last - 1`."""
        return ExactPredictions(self.prompts[first:last], self.log_probabilities[first:last])

    @property
    def positions(self) -> int:
        """Positions of all prompts."""
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
    place, kept = _place(model, max_bytes), []
    with simulating(model, None):
        for logits in all_logits(model, sampled):
            blocks = [
                block.float().log_softmax(-1).half().to(place) for block in logits.split(LOSS_BLOCK)
            ]
            kept.append(torch.cat(blocks))
            tick()
    return ExactPredictions(sampled, tuple(kept))


def _place(model: LoadedModel, max_bytes: int) -> torch.device:
    """The GPU of the model, where that leaves three times as much to compute with."""
    if model.device.type == "cuda" and not model.streamed:
        free, _ = torch.cuda.mem_get_info(model.device)
        if free >= 4 * max_bytes:
            return model.device
    return torch.device("cpu")


def _thinned(prompt: TaskPrompt, share: float) -> TaskPrompt:
    """A share of the scored positions of a prompt, evenly spaced; answers are of no interest."""
    number = max(1, math.floor(share * len(prompt.scored)))
    places = torch.arange(number, device="cpu") * len(prompt.scored) // number
    return replace(prompt, scored=prompt.scored[places], answers=())
