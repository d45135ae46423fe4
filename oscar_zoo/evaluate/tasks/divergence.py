"""How far a cache moves what the model says next: the KL divergence from the exact cache.

It is `sum(p * (log p - log q))` over the vocabulary, in nats per position, with `p` what the model
says with the exact cache and `q` with another one. Perplexity looks at one token of each position
and gains and losses cancel in it; the divergence looks at all of them and is never negative, so it
tells caches apart on much less text.

The exact log-probabilities are kept for a sample of positions, at most `MAX_BYTES` of them, as
float16: on a GPU with room for them, else in main memory. On the example model that adds 2e-7 nats
to the divergence of every cache, where bfloat16 would add 1e-5, and codes of 4 bits give 9e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oscar_zoo.evaluate.reading import Simulated
from oscar_zoo.evaluate.tasks.base import (
    LOSS_BLOCK,
    Measurement,
    Predictions,
    Task,
    TaskPrompt,
    all_logits,
    simulating,
)
from oscar_zoo.models.loading import LoadedModel

MAX_BYTES = 1 << 30
"""Of exact log-probabilities, over all prompts: 3,533 positions with a vocabulary of 151,936."""


@dataclass(frozen=True)
class ExactPredictions:
    """What a model says with the exact cache.

    Attributes:
        prompts: their `scored` positions are those of the sample.
        log_probabilities: per prompt, `[n, vocabulary]` float16.
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

    def part(self, number: int, logits: Tensor) -> tuple[float, int]:
        """Summed divergence over the positions of a prompt, in nats, and how many they are.

        Args:
            logits: `[n, vocabulary]` at its scored positions, with another cache.
        """
        exact, total = self.log_probabilities[number], 0.0
        for block, said in zip(exact.split(LOSS_BLOCK), logits.split(LOSS_BLOCK), strict=True):
            # Rounding took them off the sum of 1, without which this would not be a divergence.
            p = block.to(said.device).float().log_softmax(-1)
            difference = p - said.float().log_softmax(-1)
            # A token that is impossible with both caches says nothing.
            terms = torch.where(p.isneginf(), 0.0, p.exp() * difference)
            total += float(terms.sum(-1).double().sum())
        return total, len(exact)


def exact_predictions(
    model: LoadedModel,
    prompts: Sequence[TaskPrompt],
    *,
    max_bytes: int = MAX_BYTES,
    tick: Callable[[], None] = lambda: None,
) -> ExactPredictions:
    """Run prompts with the exact cache and keep what the model says.

    Args:
        prompts: their scored positions are thinned out evenly until the memory suffices; at least
            one stays in each.
    """
    width = model.model.get_output_embeddings().weight.shape[0]
    room = max(max_bytes // (2 * width), len(prompts))
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


def measure_divergence(
    model: LoadedModel,
    exact: ExactPredictions,
    cache: Simulated,
    *,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """The divergence of a cache, in nats per position; its parts are those of the prompts."""
    parts = []
    with simulating(model, cache):
        for number, logits in enumerate(all_logits(model, exact.prompts)):
            parts.append(exact.part(number, logits))
            tick()
    return mean_of(parts)


class PerPosition:
    """How sums of divergences make a number; see `intervals.Adding`."""

    def result(self, total: float, number: int) -> float:
        """Nats per position."""
        return total / number


def measure_both(
    model: LoadedModel,
    task: Task,
    exact: ExactPredictions,
    cache: Simulated,
    *,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Measurement, Measurement]:
    """A task under a cache and the divergence of the cache, from the same passes."""
    counted, parts = [], []
    with simulating(model, cache):
        for number, logits in enumerate(all_logits(model, task.prompts)):
            prompt, sampled = task.prompts[number], exact.prompts[number].scored
            counted.append(task.count(prompt, Predictions.of_logits(prompt, logits)))
            places = torch.searchsorted(prompt.scored, sampled).to(logits.device)
            whole = len(sampled) == len(prompt.scored)
            parts.append(exact.part(number, logits if whole else logits[places]))
            tick()
    return Measurement.of(task, counted), mean_of(parts)


def mean_of(parts: Sequence[tuple[float, int]]) -> Measurement:
    """The divergence per position, from the sums of every prompt."""
    return Measurement(
        math.fsum(total for total, _ in parts) / sum(number for _, number in parts), tuple(parts)
    )


def _thinned(prompt: TaskPrompt, share: float) -> TaskPrompt:
    """A share of the scored positions of a prompt, evenly spaced; answers are of no interest."""
    number = max(1, math.floor(share * len(prompt.scored)))
    places = torch.arange(number, device="cpu") * len(prompt.scored) // number
    return replace(prompt, scored=prompt.scored[places], answers=())
