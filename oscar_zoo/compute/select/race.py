"""Candidates leave early: successive halving over the held-out text.

Every method is measured on a quarter of the held-out sequences first, with the clip that was found
for it. Methods that cannot win leave. What stays is measured with more clips on the same quarter;
the best half of that goes on to half of the text, and the best few to all of it. Nothing is
measured twice: the sequences of a round are the first ones of the next.

Candidates are ranked by the divergence of the next token's distribution from that with the exact
cache, in nats per position. Where an engine does not hand distributions over it is the rise of the
loss, which has more noise. The rule then judges those that are left by perplexity and recall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oscar_zoo.compute.methods.table import TABLE, main_method
from oscar_zoo.compute.select.rule import Trial, paired
from oscar_zoo.evaluate.measure import Measurement

FACTOR, APART = 2.0, 0.005
"""A method leaves whose score is above `FACTOR` times the least, and by more than `APART` nats: a
quarter of the text shows such differences, and the rule calls none of them equal."""
NEAR = 1.1
"""Scores of clips of one method up to this factor count as equal; then retrieval decides."""
SECOND, LAST, OTHERS = 5, 3, 2
"""Candidates on half of the text and on all of it, and how many of them, at least, are further
clips of methods that are there already."""

Measure = Callable[[Trial, int], Trial]
"""A trial, measured on so many of the first sequences."""


@dataclass(frozen=True)
class Race:
    """One comparison.

    Attributes:
        base: perplexity with a BF16 cache, on all sequences.
        measure: measures a trial on the sequences that it lacks.
        finer: more clips for a method, with their errors.
    """

    base: Measurement
    measure: Measure
    finer: Callable[[Sequence[str]], Sequence[Trial]]

    @property
    def rounds(self) -> tuple[int, int, int]:
        """Sequences of each round."""
        number = len(self.base.parts)
        return min(number, max(2, number // 4)), max(1, math.ceil(number / 2)), number

    def run(self, offered: Mapping[str, Sequence[Trial]]) -> list[Trial]:
        """All that was measured, methods in their order.

        Args:
            offered: by method, the trial with its own clip first.
        """
        quarter, half, whole = self.rounds
        first = [self.measure(trials[0], quarter) for trials in offered.values()]
        names = [trial.method for trial in self._staying(first)]
        more = [trial for name in names for trial in offered[name][1:]]
        best = min((one for one in first if one.method in names), key=self._score).method
        alike = [name for name in names if main_method(name) == main_method(best)]
        more += self.finer(alike)
        found = [*first, *(self.measure(trial, quarter) for trial in more)]
        for sequences, number in ((half, SECOND), (whole, LAST)):
            chosen = {id(one) for one in self._best(found, names, number)}
            found = [self.measure(one, sequences) if id(one) in chosen else one for one in found]
            last = [one for one in found if len(_parts(one)) == sequences]
            names = [name for name in names if name in {t.method for t in self._staying(last)}]
        order = list(offered)
        return sorted(found, key=lambda one: order.index(one.method))

    def _staying(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those that may be kept and may still win."""
        may = [one for one in trials if TABLE[one.method].publishable]
        least = min(map(self._score, may))
        return [one for one in may if stays(self._score(one), least)]

    def _best(self, trials: Sequence[Trial], names: Sequence[str], number: int) -> list[Trial]:
        """The best clip of each method, then others, the lowest scores first."""
        longest = max(len(_parts(one)) for one in trials if one.method in names)
        left = [one for one in trials if one.method in names and len(_parts(one)) == longest]
        order = sorted(left, key=self._score)
        first = []
        for name in names:
            mine = [one for one in order if one.method == name]
            near = [one for one in mine if self._score(one) <= NEAR * self._score(mine[0])]
            first += [min(near or mine[:1], key=lambda one: one.errors.retrieval)] if mine else []
        others = [one for one in order if not any(one is chosen for chosen in first)]
        return [*first, *others[: max(OTHERS, number - len(first))]]

    def _score(self, trial: Trial) -> float:
        if trial.divergence is not None:
            return trial.divergence.value
        assert trial.perplexity is not None
        return paired(trial.perplexity, self.base)[0]


def stays(score: float, least: float) -> bool:
    """Whether a method with this score may still win against one with the `least`."""
    return score <= max(FACTOR * least, least + APART)


def whole(trial: Trial, base: Measurement) -> bool:
    """Whether the perplexity of a trial is of as much text as that of BF16."""
    return len(_parts(trial)) == len(base.parts)


def farthest(trial: Trial, trials: Sequence[Trial]) -> bool:
    """Whether no other of `trials` of the same method was measured on more text."""
    alike = (one for one in trials if one.method == trial.method)
    return len(_parts(trial)) == max(len(_parts(one)) for one in alike)


def in_halving_order(number: int) -> list[int]:
    """Indices below `number` such that every beginning of them is spread over all."""
    order: list[int] = []
    stride = 1 << max(0, (number - 1).bit_length())
    while len(order) < number:
        order += [at for at in range(0, number, stride) if at not in order]
        stride //= 2
    return order


def _parts(trial: Trial) -> tuple[tuple[float, int], ...]:
    return () if trial.perplexity is None else trial.perplexity.parts
