"""The rule by which `auto` keeps one fit, and the gates that a fit must pass.

Numbers go in and verdicts come out; nothing runs here.

Rule `auto/4`. A candidate is a fit with one clip, measured against BF16 on the same held-out text.
Candidates that cannot win have left before (`race`); the rule sees those that were measured on all
of it. Two perplexities count as equal when they differ by at most 0.1 %, or by at most one paired
standard error and 0.25 %.

Perplexity decides who is a finalist: every candidate that equals the lowest one. The best clip of
every other method becomes a finalist too where its perplexity has a better verdict than all of
these have with their recall; of a method that left early, that is measured then. The best clip of a
method has the method's lowest perplexity or equals it; of several such clips it is the one with the
least retrieval error, which perplexity hardly shows. When there are too many finalists, it comes
first. Recall is measured for the finalists. Then each step chooses among the candidates that the
step before left:

1. Drop a candidate whose verdict on the gates is worse than another's. A verdict that is worse
   because of recall counts only if recall is lower by the margin of step 3.
2. Keep the candidates that have the lowest perplexity or equal it.
3. Drop a candidate whose recall is below another's by half a point and one paired standard error.
   There are too few questions to ask for a larger margin, and keeping a candidate that forgets
   costs more than asking more of an engine without need.
4. Keep the method that asks least of an engine, which is the first in `table.TABLE`. Of variants of
   one method keep the one with the lowest perplexity. Its clips now differ only by chance: take the
   least retrieval error, or the best recall among those within a tenth of it.

A candidate that loses recall therefore never beats one that passes both gates. Recall is left out
when it was not measured, and when the model itself fails half of the questions. With `fast` (rule
`auto-fast/1`) neither perplexity nor recall is measured. Then the rule keeps the least output
error, or a candidate within 5 % of it that asks less of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oscar_zoo.artifact.width_selection import VerifiedWidths
from oscar_zoo.compute.methods.table import TABLE, main_method
from oscar_zoo.compute.select.attention_errors import ClipErrors, geometric_mean, ratio_text
from oscar_zoo.evaluate.measure import Measurement
from oscar_zoo.evaluate.questions import Recall

RULE, FAST_RULE = "auto/4", "auto-fast/1"
PERPLEXITY_PASS, PERPLEXITY_FAIL = 0.5, 6.0
"""Rise of perplexity over BF16, in percent, up to which a fit passes, and from which it fails;
between: a remark."""
DIVERGENCE_PASS = 0.004
"""Divergence of the typical prompt, in nats, above which bits are raised too. It has far less noise
than perplexity, which rises by about its hundredfold in percent, on seven caches by a third to all
of that. The Rust book on SmolLM2-135M diverges by a tenth to a third more than typical `mix`."""
RECALL_PASS, RECALL_FAIL = 2.0, 10.0
"""Loss of recall against BF16, in points."""
CHANCE = 2.0
"""Standard errors within which a fit passes a gate, too."""
WORST_LAYER = 1.5
"""Largest output error of a layer, in units of the Hadamard matrix's."""
EQUAL_PERCENT, NOISE_PERCENT, EQUAL_ERROR = 0.1, 0.25, 1.05
EQUAL_RECALL, NEAR = 0.005, 1.1
FINALISTS = 3
"""Candidates whose recall is measured together; more where so many methods are equal."""
LARGEST = 1e9
"""Stands for infinity in JSON."""

Verdict = Literal["pass", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = ("pass", "warn", "fail")
"""Best first."""


def typical(divergence: Measurement | None) -> float:
    """The geometric mean over prompts, so that no strange one outweighs the others; else 0."""
    return geometric_mean(loss / n for loss, n in divergence.parts) if divergence else 0.0


@dataclass(frozen=True)
class Gate:
    """One limit, up to which a value passes, and what was measured against it; a standard error
    where chance is on the fit's side."""

    name: str
    value: float
    limit: float
    result: Verdict
    standard_error: float | None = None


@dataclass(frozen=True)
class Base:
    """The model with a BF16 cache: perplexity, its answers where recall was measured, the questions
    behind them, and why recall takes no part in the choice, where it does not."""

    perplexity: Measurement
    answers: Measurement | None = None
    questions: Recall | None = None
    remark: str | None = None

    @property
    def recall(self) -> Measurement | None:
        """`None` when it is not to be judged."""
        return None if self.remark else self.answers

    def recall_block(self, found: float | None) -> dict[str, Any]:
        """Of the `quality` in a manifest, where an INT2 cache has `found`."""
        facts = {} if self.questions is None else dict(self.questions.describe())
        own = self.answers.value if self.answers else None
        return {**facts, "bf16": own, "remark": self.remark, "int2": found}


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was measured with a cache: perplexity of held-out text and recall of facts, both beyond
    the windows, and the divergence from the exact cache on some of the first sequences, in nats per
    position. Of a trial that left early, all are of the first sequences only."""

    perplexity: Measurement | None = None
    recall: Measurement | None = None
    divergence: Measurement | None = None

    def change(self, base: Base | None) -> tuple[float, float] | None:
        """Rise of perplexity over BF16 and its standard error, in percent."""
        if self.perplexity is None or base is None:
            return None
        return change_percent(self.perplexity, base.perplexity)

    def gates(self, base: Base | None) -> tuple[Gate, ...]:
        """The gates that decide, as far as they were measured."""
        found = []
        if base is not None and self.perplexity is not None:
            found.append(perplexity_gate(self.perplexity, base.perplexity))
            if self.recall is not None and base.recall is not None:
                found.append(recall_gate(self.recall, base.recall))
        return tuple(found)

    def as_block(self, base: Base) -> VerifiedWidths:
        """As in a manifest."""
        change, kl = self.change(base), self.divergence
        return VerifiedWidths(
            divergence=None if kl is None else max(0.0, kl.value),
            divergence_error=None if kl is None else standard_error(kl),
            change_percent=change[0] if change else None,
            change_error=change[1] if change else None,
            recall=None if self.recall is None else self.recall.value,
        )


@dataclass(frozen=True)
class Trial(Verified):
    """One fit, by its name in `table.TABLE`, with one clip, as far as it was measured; `errors` are
    of the attention layers."""

    method: str
    errors: ClipErrors


def finalists(trials: Sequence[Trial]) -> list[int]:
    """Indices of the `trials` whose recall is measured. All have a perplexity, and they come in the
    order of `table.TABLE`."""
    order = sorted(range(len(trials)), key=lambda at: _perplexity(trials[at]).value)
    lowest = trials[order[0]]
    equal = [at for at in order if _equal(trials[at], lowest)]
    first = [at for at in _best_clips(trials, order) if at in equal]
    chosen = list(dict.fromkeys([order[0], *first]))
    return list(dict.fromkeys([*chosen, *equal]))[: max(FINALISTS, len(chosen) + 1)]


def substitutes(trials: Sequence[Trial], measured: Sequence[int], base: Base) -> list[int]:
    """Further trials whose recall to measure: those whose verdict may be better than that of all
    `measured`."""
    verdicts = [VERDICTS.index(worst(trial.gates(base))) for trial in trials]
    reached = min(verdicts[at] for at in measured)
    order = sorted(range(len(trials)), key=lambda at: _perplexity(trials[at]).value)
    tried = {trials[at].method for at in measured}
    allowed = [at for at in _best_clips(trials, order) if verdicts[at] < reached]
    return [at for at in allowed if trials[at].method not in tried]


def best(trials: Sequence[Trial], base: Base) -> tuple[int, str]:
    """Which of `trials` to keep, and why, in a sentence without a full stop."""
    left = [
        at
        for at, one in enumerate(trials)
        if not any(_beaten(one, other, base) for other in trials)
    ]
    least = _lowest(trials, left)
    left = [at for at in left if _equal(trials[at], trials[least])]
    left = [at for at in left if not any(_forgets(trials[at], trials[other]) for other in left)]
    main = main_method(trials[left[0]].method)
    alike = [at for at in left if main_method(trials[at].method) == main]
    same = [at for at in left if trials[at].method == trials[_lowest(trials, alike)].method]
    least_error = min(trials[at].errors.retrieval for at in same)
    near = [at for at in same if trials[at].errors.retrieval <= NEAR * least_error]
    kept = min(near, key=lambda at: (-_share(trials[at].recall), _perplexity(trials[at]).value))
    lowest, rival = _lowest(trials, range(len(trials))), _lowest(trials, left)
    if kept == lowest:
        return kept, "the lowest perplexity on all of the held-out text"
    if kept == rival:
        lost = "has the lowest perplexity on held-out text, but recalls too little"
        return kept, f"{_named(trials[lowest])} {lost}"
    more = "it asks less of a server"
    if trials[kept].method == trials[rival].method:
        more = "its attention to distant tokens is more accurate"
    return kept, f"as good as {_named(trials[rival])} on held-out text, and {more}"


def best_by_error(trials: Sequence[Trial]) -> tuple[int, str]:
    """As `best`, when only errors are known."""
    errors = [trial.errors.output_geo for trial in trials]
    kept = next(at for at, error in enumerate(errors) if error <= EQUAL_ERROR * min(errors))
    lowest = errors.index(min(errors))
    if kept == lowest:
        return kept, "the lowest output error on held-out text"
    good = f"as good as {trials[lowest].method} on held-out text"
    return kept, f"{good}, and it asks less of a server"


def worst(gates: Sequence[Gate]) -> Verdict:
    """The verdict of them all."""
    return max((gate.result for gate in gates), key=VERDICTS.index, default="pass")


def paired(one: Measurement, other: Measurement) -> tuple[float, float]:
    """Mean difference per counted token, and its standard error over sequences. Where one was
    measured on fewer sequences, it is of these, which are the first of the other. The standard
    error is 0 for a single sequence."""
    pairs = list(zip(one.parts, other.parts, strict=False))
    mean = sum(a - b for (a, _), (b, _) in pairs) / sum(n for (_, n), _ in pairs)
    if len(pairs) < 2 or not math.isfinite(mean):
        return mean, 0.0
    per = [(a - b) / n - mean for (a, n), (b, _) in pairs]
    return mean, math.sqrt(sum(x * x for x in per) / (len(per) - 1) / len(per))


def standard_error(found: Measurement) -> float:
    """Of the mean per position, over prompts; 0 for a single prompt."""
    number = len(found.parts)
    if number < 2:
        return 0.0
    means = [total / count for total, count in found.parts]
    middle = math.fsum(means) / number
    return math.sqrt(math.fsum((one - middle) ** 2 for one in means) / (number - 1) / number)


def change_percent(found: Measurement, base: Measurement) -> tuple[float, float]:
    """Rise of perplexity over BF16 and its standard error, in percent."""
    mean, error = paired(found, base)
    if not math.isfinite(mean):
        return LARGEST, LARGEST
    change, error = 100 * math.expm1(min(mean, 500.0)), 100 * math.exp(min(mean, 20.0)) * error
    return min(change, LARGEST), min(error, LARGEST)


def perplexity_gate(found: Measurement, base: Measurement) -> Gate:
    """How far perplexity may rise over BF16."""
    change, error = change_percent(found, base)
    result = _verdict(change, max(PERPLEXITY_PASS, CHANCE * error), PERPLEXITY_FAIL)
    return Gate("perplexity_change_percent", change, PERPLEXITY_PASS, result, error)


def recall_gate(found: Measurement, base: Measurement) -> Gate:
    """How much recall may be lost against BF16, in points; chance is on the fit's side."""
    loss, error = (100 * x for x in paired(base, found))
    result = _verdict(loss, max(RECALL_PASS, CHANCE * error), RECALL_FAIL + error)
    return Gate("recall_loss_points", loss, RECALL_PASS, result, error)


def output_gates(errors: ClipErrors, hadamard: ClipErrors) -> tuple[Gate, ...]:
    """The attention output against that under the data-free baseline; only ever a remark."""
    layers = zip(errors.output, hadamard.output, strict=True)
    worst = max(mine / max(theirs, 1 / LARGEST) for mine, theirs in layers)
    overall = errors.output_geo / max(hadamard.output_geo, 1 / LARGEST)
    found = (
        ("output_error_over_hadamard", overall, 1.0),
        ("worst_layer_over_hadamard", worst, WORST_LAYER),
    )
    return tuple(
        Gate(name, value, limit, _verdict(value, limit, math.inf)) for name, value, limit in found
    )


def _perplexity(trial: Trial) -> Measurement:
    assert trial.perplexity is not None
    return trial.perplexity


def _lowest(trials: Sequence[Trial], among: Sequence[int]) -> int:
    return min(among, key=lambda at: _perplexity(trials[at]).value)


def _best_clips(trials: Sequence[Trial], order: Sequence[int]) -> list[int]:
    """The best trial of each method, methods in ascending order of their lowest perplexity. `order`
    ascends in perplexity."""
    found = []
    for method in dict.fromkeys(trials[at].method for at in order):
        mine = [at for at in order if trials[at].method == method]
        equal = [at for at in mine if _equal(trials[at], trials[mine[0]])]
        found.append(min(equal, key=lambda at: trials[at].errors.retrieval))
    return found


def _equal(trial: Trial, lowest: Trial) -> bool:
    mean, error = paired(_perplexity(trial), _perplexity(lowest))
    return 100 * mean <= EQUAL_PERCENT or 100 * mean <= min(100 * error, NOISE_PERCENT)


def _named(trial: Trial) -> str:
    clip = trial.errors.clip
    return f"{trial.method} with clip {ratio_text(clip.k)},{ratio_text(clip.v)}"


def _share(recall: Measurement | None) -> float:
    return 0.0 if recall is None else recall.value


def _beaten(trial: Trial, other: Trial, base: Base) -> bool:
    mine, theirs = (VERDICTS.index(worst(one.gates(base))) for one in (trial, other))
    by_perplexity = [VERDICTS.index(worst(one.gates(base)[:1])) for one in (trial, other)]
    return mine > theirs and (by_perplexity[0] > by_perplexity[1] or _forgets(trial, other))


def _forgets(trial: Trial, other: Trial) -> bool:
    if trial.recall is None or other.recall is None:
        return False
    mean, error = paired(other.recall, trial.recall)
    return mean > max(EQUAL_RECALL, error)


def _verdict(value: float, passes: float, fails: float) -> Verdict:
    return "pass" if value <= passes else "warn" if value <= fails else "fail"


FACTOR, APART = 2.0, 0.005
"""A method leaves whose score is above `FACTOR` times the least, and by more than `APART` nats: a
quarter of the text shows such differences, and the rule calls none of them equal."""
NEAR_CLIPS = 1.1
"""Scores of clips of one method up to this factor count as equal; then retrieval decides."""
SECOND, LAST, OTHERS = 5, 3, 2
"""Candidates on half of the text and on all of it, and how many of them, at least, are further
clips of methods that are there already."""


def race(
    base: Measurement,
    measure: Callable[[Trial, int], Trial],
    finer: Callable[[Sequence[str]], Sequence[Trial]],
    offered: Mapping[str, Sequence[Trial]],
) -> list[Trial]:
    """Candidates leave early: successive halving over the held-out text. All that was measured,
    methods in their order.

    Every method is measured on a quarter of the sequences first, with the clip that was found for
    it. Methods that cannot win leave. What stays is measured with more clips on the same quarter;
    the best half of that goes on to half of the text, and the best few to all of it. Nothing is
    measured twice: the sequences of a round are the first ones of the next. Candidates are ranked
    by the divergence of the next token's distribution from that with the exact cache.

    Args:
        base: perplexity with a BF16 cache, on all sequences.
        measure: measures a trial on so many of the first sequences, where it lacks them.
        finer: more clips for some methods, with their errors.
        offered: the trials of each method, the clip that was found first.
    """
    number = len(base.parts)
    quarter, half = min(number, max(2, number // 4)), max(1, math.ceil(number / 2))
    first = [measure(trials[0], quarter) for trials in offered.values()]
    names = _staying(first)
    more = [trial for name in names for trial in offered[name][1:]]
    main = main_method(min((one for one in first if one.method in names), key=_score).method)
    more += finer([name for name in names if main_method(name) == main])
    found = [*first, *(measure(trial, quarter) for trial in more)]
    for sequences, most in ((half, SECOND), (number, LAST)):
        chosen = {id(one) for one in _best_few(found, names, most)}
        found = [measure(one, sequences) if id(one) in chosen else one for one in found]
        last = _staying([one for one in found if len(_parts(one)) == sequences])
        names = [name for name in names if name in last]
    order = list(offered)
    return sorted(found, key=lambda one: order.index(one.method))


def _staying(trials: Iterable[Trial]) -> list[str]:
    """Methods that may be kept and may still win."""
    may = [one for one in trials if TABLE[one.method].publishable]
    least = min(map(_score, may))
    limit = max(FACTOR * least, least + APART)
    return list(dict.fromkeys(one.method for one in may if _score(one) <= limit))


def _best_few(trials: Sequence[Trial], names: Sequence[str], number: int) -> list[Trial]:
    """The best clip of each method, then others, the lowest scores first."""
    racing = [one for one in trials if one.method in names]
    longest = max(len(_parts(one)) for one in racing)
    order = sorted((one for one in racing if len(_parts(one)) == longest), key=_score)
    first = []
    for name in names:
        mine = [one for one in order if one.method == name]
        near = [one for one in mine if _score(one) <= NEAR_CLIPS * _score(mine[0])]
        first += [min(near or mine[:1], key=lambda one: one.errors.retrieval)] if mine else []
    others = [one for one in order if not any(one is chosen for chosen in first)]
    return [*first, *others[: max(OTHERS, number - len(first))]]


def _score(trial: Trial) -> float:
    assert trial.divergence is not None
    return trial.divergence.value


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
