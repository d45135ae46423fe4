"""`auto`: measure every method in its INT2 cache on held-out text, and keep the best.

First come the errors of each fit in the attention layers, for every clip of a small grid, which
finds its clip (`attention_errors`), on half of the held-out sequences. Then candidates with that
clip, with the recipe's and with none, and for the best method with a few more, are measured on more
and more of the text, and leave when they cannot win (`race`). Recall is measured last, only for
candidates that could still be kept. The rule and its limits are in `rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from oscar_zoo.artifact.specs import ServingRecipe, Windows
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import Fits
from oscar_zoo.compute.methods.table import TABLE
from oscar_zoo.compute.phases import HELD_OUT, MORE_RECALL
from oscar_zoo.compute.select import rule
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.compute.select.meter import Meter
from oscar_zoo.compute.select.questions import Questions
from oscar_zoo.compute.select.race import Race, farthest, in_halving_order, whole
from oscar_zoo.compute.select.rule import Base, Gate, Trial
from oscar_zoo.compute.select.trial_runner import TrialRunner
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.measure import TaskPrompt
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.next_step import NextStep


def choose(
    model: RunningModel,
    heldout: HeldOut,
    fits: Fits,
    recipe: ServingRecipe,
    *,
    fixed_clip: bool = False,
    fast: bool = False,
    progress: Progress = lambda done, total, phase: None,
) -> Choice:
    """Measure every fit with the clips worth it, and keep the best.

    Args:
        fits: at least one of them publishable.
        recipe: the settings of the caches; its windows decide which positions count.
        fixed_clip: measure with the recipe's clip only.
        fast: decide by errors of attention; neither perplexity nor recall is measured.
        progress: called during the phases `held-out rows`, `errors`, `perplexity`, `recall`
            and `more recall`.
    """
    task = heldout_task(heldout, recipe.windows)
    meter = Meter(progress)
    half = task.prompts[: None if fast else -(-len(task.prompts) // 2)]
    meter.start(HELD_OUT, len(half))
    rows = model.held_out_rows(
        [prompt.ids.tolist() for prompt in half], recipe.windows, tick=meter.at
    )
    runner = TrialRunner(model, rows, fits, recipe, meter)
    errors = runner.errors(fixed_clip=fixed_clip)
    trials = [Trial(name, found.found) for name, found in errors.items()]
    base, asked, exact = None, Questions(), None
    if fast:
        final = [at for at, trial in enumerate(trials) if TABLE[trial.method].publishable]
        at, reason = rule.best_by_error([trials[n] for n in final])
    else:
        runner.start_perplexities(task)
        base = Base(runner.own_perplexity(task))
        exact = runner.exact_half(task)
        measure = partial(runner.on_more, task=task, exact=exact)
        finer = partial(runner.finer, errors=errors) if not fixed_clip else lambda names: ()
        offered_clips = {
            name: [Trial(name, one) for one in found.clips] for name, found in errors.items()
        }
        trials = Race(base.perplexity, measure, finer).run(offered_clips)
        offered = [at for at, one in enumerate(trials) if TABLE[one.method].publishable]
        lasting = [at for at in offered if whole(trials[at], base.perplexity)]
        final = [lasting[n] for n in rule.finalists([trials[at] for at in lasting])]
        asked = runner.questions(heldout, len(final))
        if asked.remark is None:
            base = replace(base, recall=asked.own)
            runner.recalls(trials, final, asked)
            pool = [at for at in offered if farthest(trials[at], trials)]
            measured = [pool.index(at) for at in final]
            more = [pool[n] for n in rule.substitutes([trials[at] for at in pool], measured, base)]
            for at in more:  # of methods that left early
                trials[at] = measure(trials[at], len(task.prompts))
            meter.start(MORE_RECALL, len(more) * len(asked.task.prompts) if asked.task else 0)
            runner.recalls(trials, more, asked)
            final = sorted(final + more)
        at, reason = rule.best([trials[n] for n in final], base)
    kept = trials[final[at]]
    return Choice(
        result=fits.results[kept.method],
        recipe=recipe.model_copy(update={"clip": kept.errors.clip}),
        trials=tuple(trials),
        at=final[at],
        reason=reason,
        errors=errors,
        base=base,
        heldout=heldout,
        refused=fits.refused,
        questions=asked,
        exact=exact,
    )


def heldout_task(heldout: HeldOut, windows: Windows) -> Perplexity:
    """Perplexity of held-out text at positions beyond both windows.

    The sequences stand in an order in which every beginning is spread over the text.
    """
    first, shortest = windows.sink + windows.recent, shortest_measured(windows)
    prompts = [
        TaskPrompt(
            torch.tensor(sequence, device="cpu"),
            torch.arange(first, len(sequence) - 1, device="cpu"),
        )
        for sequence in heldout.sequences
        if len(sequence) >= shortest
    ]
    if not prompts:
        raise UsageError(
            f"no held-out sequence has {shortest} tokens; {first} tokens stay in high precision.",
            hint="use longer sequences, or more text",
        )
    return Perplexity(tuple(prompts[at] for at in in_halving_order(len(prompts))))


def shortest_measured(windows: Windows) -> int:
    """Tokens of the shortest held-out sequence with a token to predict beyond both windows."""
    return windows.sink + windows.recent + 2


def refuse_poor(name: str, gates: Sequence[Gate], step: NextStep | None = None) -> None:
    """Raise `ComputeFailed` when the fit `name` fails one of `gates`; `step` would help."""
    failed = failure(gates)
    if failed is not None:
        raise ComputeFailed(
            f"the best fit, {name}, {failed}.",
            hint="use more or other text, or keep it with --allow-poor",
            next_step=step,
        )


def failure(gates: Sequence[Gate]) -> str | None:
    """The first of `gates` that fails, in words that follow a subject; `None` where none does."""
    words = {
        "perplexity_change_percent": (
            "raises perplexity by",
            f"% (limit {rule.PERPLEXITY_FAIL:.0f} %)",
        ),
        "recall_loss_points": ("loses recall by", f"points (limit {rule.RECALL_FAIL:.0f})"),
    }
    for gate in gates:
        if gate.result == "fail":
            what, limit = words[gate.name]
            return f"{what} {gate.value:.1f} {limit}"
    return None
