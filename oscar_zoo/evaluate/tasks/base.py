"""What a task is: token sequences, and a number that adds up over them.

A task is built once and measured under several caches, so every cache sees the same tokens. The
sums of each sequence are kept, so two caches can be compared sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oscar_zoo.evaluate.reading import Simulated
from oscar_zoo.evaluate.simulated_cache import SimulatedCache
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.layer_replay import run_by_layer
from oscar_zoo.models.loading import LoadedModel

LOSS_BLOCK = 256


@dataclass(frozen=True)
class TaskPrompt:
    """One sequence that starts at position 0.

    Attributes:
        ids: `[T]` int64, in main memory.
        scored: `[n]` int64, there too, ascending: positions whose predictions (of the next token)
            the task looks at.
        answers: stretches of `scored`, `[first, last)`, that belong to one answer; empty when each
            stands alone.
    """

    ids: Tensor
    scored: Tensor
    answers: tuple[tuple[int, int], ...] = ()

    @property
    def targets(self) -> Tensor:
        """`[n]` int64: the true next tokens at the scored positions."""
        return self.ids[self.scored + 1]


@dataclass(frozen=True)
class Predictions:
    """What a model says at the scored positions of a prompt.

    Attributes:
        losses: `[n]` float64, negative log-likelihood of the true next token in nats.
        right: `[n]` bool, whether that token is the most likely one.
    """

    losses: Tensor
    right: Tensor

    @classmethod
    def of_logits(cls, prompt: TaskPrompt, logits: Tensor) -> Predictions:
        """From `[n, vocabulary]` at the scored positions.

        Logits become float32 block by block, to save memory.
        """
        wanted = prompt.targets.to(logits.device)
        losses = [
            torch.nn.functional.cross_entropy(block.float(), target, reduction="none").double()
            for block, target in zip(
                logits.split(LOSS_BLOCK), wanted.split(LOSS_BLOCK), strict=True
            )
        ]
        return cls(torch.cat(losses).cpu(), (logits.argmax(-1) == wanted).cpu())


class Task(Protocol):
    """Something to measure."""

    @property
    def name(self) -> str:
        """Key of the result, such as `perplexity`."""

    @property
    def prompts(self) -> Sequence[TaskPrompt]:
        """The sequences."""

    def count(self, prompt: TaskPrompt, said: Predictions) -> tuple[float, int]:
        """Sum and number of the values to average over one prompt, from what was said at the
        positions `prompt.scored`."""

    def result(self, total: float, number: int) -> float:
        """The reported number, from the sums over all prompts."""

    def describe(self) -> Mapping[str, int | float | str]:
        """Facts that a reader needs to repeat the measurement."""


@dataclass(frozen=True)
class Measurement:
    """A task under one cache.

    Attributes:
        value: the task's result over all prompts.
        parts: `(sum, number)` of every prompt, in order.
    """

    value: float
    parts: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, task: Task, parts: Sequence[tuple[float, int]]) -> Measurement:
        """From what `task.count` gave for every prompt."""
        return cls(
            task.result(sum(total for total, _ in parts), sum(n for _, n in parts)), tuple(parts)
        )


def measure(
    model: LoadedModel,
    task: Task,
    cache: Simulated | None = None,
    *,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Run every prompt of `task` through the model.

    Args:
        cache: to simulate at every position; `None` for a BF16 cache.
    """
    parts = []
    with simulating(model, cache):
        for prompt, logits in zip(task.prompts, all_logits(model, task.prompts), strict=True):
            parts.append(task.count(prompt, Predictions.of_logits(prompt, logits)))
            tick()
    return Measurement.of(task, parts)


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
    """`[n, vocabulary]` at the scored positions of each prompt, in order.

    All prompts go through one layer before the next when the weights are read layer by layer.
    """
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
    found: Tensor
    if model.spread:  # positions would have to be on the device of the last layer
        found = model.model(ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits[0]
        return found[(prompt.scored - first).to(found.device)]
    found = model.model(ids, use_cache=False, logits_to_keep=prompt.scored.to(model.device)).logits[
        0
    ]
    return found
