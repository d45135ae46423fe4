"""`auto`: every method is measured on held-out text in the cache it would be served with, and the best one is kept.

Rule `auto/1`: the lowest perplexity wins. Candidates within 0.1 % of it, or within one paired standard error and
0.25 %, count as equal, and of those the one that asks least of an engine wins (the order of `fit.METHODS`). What is
kept must pass its gate: how far perplexity may rise over BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import METHODS, FitResult, Fits
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.cache import CacheSpec
from oscar_zoo.evaluate.models import LoadedModel
from oscar_zoo.evaluate.tasks.base import Measurement, Prompt, measure
from oscar_zoo.evaluate.tasks.perplexity import Perplexity

RULE = "auto/1"
PASS_PERCENT, FAIL_PERCENT = 2.0, 6.0
"""Rise of perplexity over BF16 up to which a result passes, and from which it fails; between them it is remarked on."""
EQUAL_PERCENT, NOISE_PERCENT = 0.1, 0.25
FINER_CLIPS = (0.94, 0.925, 0.9)
"""Ratios that the best method is also measured with, the same for K and V."""
Plan = tuple[FitResult, ServingRecipe]

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Trial:
    """One candidate with one clip.

    Attributes:
        method: of `fit.METHODS`.
        clip_k, clip_v: ratios; 0 for none.
        perplexity: on held-out text, positions beyond both windows.
        change_percent: over BF16.
        standard_error: of `change_percent`, paired by sequence.
        gate: what `change_percent` means.
    """

    method: str
    clip_k: float
    clip_v: float
    perplexity: float
    change_percent: float
    standard_error: float
    gate: Verdict


@dataclass(frozen=True)
class Choice:
    """What `auto` keeps.

    Attributes:
        result: the fit.
        recipe: the serving recipe with its clip.
        chosen: its trial.
        trials: of all candidates, in the order they were measured.
        bf16_perplexity: of the model as it is.
        reason: why, in one sentence.
        selection, quality: blocks of the manifest.
    """

    result: FitResult
    recipe: ServingRecipe
    chosen: Trial
    trials: tuple[Trial, ...]
    bf16_perplexity: float
    reason: str
    selection: dict[str, Any]
    quality: dict[str, Any]


def choose(
    loaded: LoadedModel,
    heldout: HeldOut,
    fits: Fits,
    recipe: ServingRecipe,
    *,
    fixed_clip: bool = False,
    allow_poor: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Choice:
    """Measure every fit with and without the clip of `recipe`, the best one with more clips, and keep the best.

    Args:
        loaded: the model.
        heldout: no sequence of it was calibrated on.
        fits: at least one of them publishable.
        recipe: how caches are made; its windows say which positions count.
        fixed_clip: measure with its clip only.
        allow_poor: keep a result that fails its gate.
        progress: `(sequences done, in all, "choose")`.

    Raises:
        ComputeFailed: the best one fails its gate, or the model gives no finite perplexity.
        UsageError: the held-out sequences are no longer than both windows.
    """
    task = _task(heldout, recipe.windows)
    plans = list(_plans(fits, recipe, fixed_clip))
    total, done = (1 + len(plans) + (0 if fixed_clip else len(FINER_CLIPS))) * len(task.prompts), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total, "choose")

    base = measure(loaded, task, tick=tick)
    if not math.isfinite(base.value):
        raise ComputeFailed("the model's own perplexity is not finite on held-out text.", hint="try --dtype float32")

    def tried(plan: Plan) -> Measurement:
        return measure(loaded, task, CacheSpec(plan[0].k, plan[0].v, plan[1]), tick=tick)

    found = [tried(plan) for plan in plans]
    if not fixed_clip:
        kept = plans[_best(plans, found)][0]
        for plan in _finer_clips(kept, recipe):
            plans.append(plan)
            found.append(tried(plan))
    at = _best(plans, found)
    trials = tuple(_trial(*plan, one, base) for plan, one in zip(plans, found, strict=True))
    (result, chosen_recipe), trial = plans[at], trials[at]
    reason = _reason(trial, trials)
    if trial.gate == "fail" and not allow_poor:
        rise = f"{trial.change_percent:.1f} % (limit {FAIL_PERCENT:.0f} %)"
        raise ComputeFailed(
            f"the best fit, {trial.method}, raises perplexity by {rise}.",
            hint="use more or other text; to keep it all the same: --allow-poor",
        )
    selection = {
        "rule": RULE,
        "heldout": {"prompts_sha256": heldout.prompts_sha256, "tokens": heldout.tokens},
        "bf16_perplexity": base.value,
        "candidates": [asdict(one) for one in trials],
        "chosen": asdict(trial),
        "reason": reason,
        "refused": dict(fits.refused),
    }
    gate = {"name": "perplexity_change_percent", "value": trial.change_percent, "limit": PASS_PERCENT}
    quality: dict[str, Any] = {"windows": recipe.windows.model_dump(), "quantizer": recipe.quantizer}
    quality["gates"] = [gate | {"result": trial.gate}]
    return Choice(result, chosen_recipe, trial, trials, base.value, reason, selection, quality)


def _task(heldout: HeldOut, windows: Windows) -> Perplexity:
    first = windows.sink + windows.recent
    prompts = [
        Prompt(torch.tensor(sequence), torch.arange(first, len(sequence) - 1))
        for sequence in heldout.sequences
        if len(sequence) > first + 1
    ]
    if not prompts:
        raise UsageError(
            f"no held-out sequence is longer than the {first} tokens that stay in high precision.",
            hint="use longer sequences (--seq-len), or name a method",
        )
    return Perplexity(tuple(prompts))


def _plans(fits: Fits, recipe: ServingRecipe, fixed_clip: bool) -> Iterator[Plan]:
    """Every fit with every clip that is worth a measurement; `identity` only shows what no transform costs."""
    plain = recipe.model_copy(update={"clip": Clip(k=0.0, v=0.0, algorithm="none")})
    for name, result in fits.results.items():
        if METHODS[name].publishable:
            yield result, recipe
        if not fixed_clip and (recipe.clip.k or recipe.clip.v):
            yield result, plain


def _trial(result: FitResult, recipe: ServingRecipe, found: Measurement, base: Measurement) -> Trial:
    mean, error = _paired(found, base)
    change = 100 * math.expm1(min(mean, 500.0)) if math.isfinite(mean) else math.inf
    change, value = min(change, 1e9), min(found.value, 1e9)  # JSON has no infinity
    verdict: Verdict = "pass" if change <= PASS_PERCENT else "warn" if change <= FAIL_PERCENT else "fail"
    error = min(100 * math.exp(min(mean, 20.0)) * error, 1e9) if math.isfinite(mean) else 1e9
    return Trial(result.method.name, recipe.clip.k, recipe.clip.v, value, change, error, verdict)


def _paired(one: Measurement, other: Measurement) -> tuple[float, float]:
    """Mean difference in nats per token and its standard error over sequences."""
    number = sum(n for _, n in one.parts)
    mean = sum(a - b for (a, _), (b, _) in zip(one.parts, other.parts, strict=True)) / number
    if len(one.parts) < 2:
        return mean, 0.0
    per = [(a - b) / n - mean for (a, n), (b, _) in zip(one.parts, other.parts, strict=True)]
    return mean, math.sqrt(sum(x * x for x in per) / (len(per) - 1) / len(per))


def _finer_clips(result: FitResult, recipe: ServingRecipe) -> Iterator[Plan]:
    for ratio in FINER_CLIPS:
        yield result, recipe.model_copy(update={"clip": Clip(k=ratio, v=ratio)})


def _best(plans: Sequence[Plan], found: Sequence[Measurement]) -> int:
    """Which plan to keep; see the module docstring."""
    allowed = [at for at, (result, _) in enumerate(plans) if result.method.publishable]
    lowest = min(allowed, key=lambda at: found[at].value)
    for at in allowed:
        mean, error = _paired(found[at], found[lowest])
        if 100 * mean <= EQUAL_PERCENT or 100 * mean <= min(100 * error, NOISE_PERCENT):
            # Of equal methods the one that comes first, of its clips the best.
            same = (other for other in allowed if plans[other][0] is plans[at][0])
            return min(same, key=lambda other: found[other].value)
    return lowest


def _reason(chosen: Trial, trials: Sequence[Trial]) -> str:
    lowest = min((t for t in trials if METHODS[t.method].publishable), key=lambda t: t.perplexity)
    if lowest.method == chosen.method:
        return "the lowest perplexity on held-out text"
    return f"as good as {lowest.method} on held-out text, and asks less of an engine"
