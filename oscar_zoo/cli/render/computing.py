"""A planned computation and its result, as people and programs see them."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from oscar_zoo.cli.pasting import pasted, saved, typed
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.choice import print_choice
from oscar_zoo.cli.render.widths import width_lines
from oscar_zoo.evaluate.shared import duration
from oscar_zoo.serving.prepared import model_argument

if TYPE_CHECKING:
    from oscar_zoo.app.obtain import Computed
    from oscar_zoo.compute.job import ComputeResult


def about(seconds: float | None) -> str:
    """How long a computation takes, as rough as the estimate is."""
    return "nobody can say how long" if seconds is None else f"about {duration(seconds)}"


def plan_sentence(facts: Mapping[str, Any]) -> str:
    """What a computation would do; `facts` are those of `ComputePlan`."""
    text = (
        f"{facts['tokens']:,} tokens of {facts['data']} on {facts['device']}:"
        f" {about(facts['seconds'])}."
    )
    if facts["fetched_bytes"] is not None:
        size = terminal.gigabytes(facts["fetched_bytes"])
        text += f" Its weights, {size}, are fetched first unless they are here."
    return text


def computed_facts(computed: Computed | None) -> dict[str, Any]:
    """What a computation adds to the JSON of `pull`; nothing where none was needed."""
    if computed is None:
        return {}
    plan, result = computed.plan, computed.result
    return {
        "computed": True,
        "model": plan.choice.source,
        "seconds": dict(result.seconds),
        "report": None if computed.report is None else str(computed.report),
        "moments": None if computed.moments is None else str(computed.moments),
        "estimated_seconds": plan.seconds,
        "notes": [*(note.text for note in plan.notes), *result.notes],
    }


def result_facts(result: ComputeResult) -> dict[str, Any]:
    """The JSON of `compute`."""
    from oscar_zoo.registry.entries import artifact_summary

    return {
        "schema": "oscar-zoo.compute/1",
        "path": typed(result.path),
        "notes": list(result.notes),
        "moments": typed(result.moments) if result.moments else None,
        "seconds": dict(result.seconds),
        "report": typed(result.report) if result.report else None,
        "selection": result.manifest.fit.selection,
        "quality": result.manifest.quality,
        **artifact_summary(result.manifest),
    }


def print_result(result: ComputeResult) -> None:
    """How `auto` chose, and where the artifact is: the data of `compute`."""
    if result.choice is not None:
        print_choice(result.choice)
    if result.widths is not None:
        for line in width_lines(result.widths.selection):
            terminal.out().print(line)
    terminal.out().print(saved(result.path, result.manifest))


def next_steps(result: ComputeResult, model: str, revision: str | None) -> list[str]:
    """The files beside the artifact, and the command that measures it; `model` and `revision` as
    the user gave them."""
    lines = [f"Report: {typed(result.report)}"] if result.report is not None else []
    if result.moments is not None:
        lines.append(
            f"Moments beside it, for another method without the model: {typed(result.moments)}"
        )
    at = f" --revision {quote(revision)}" if revision else ""
    command = f"oscar-zoo eval {pasted(result.path)} --model {model_argument(model)}{at}"
    return [*lines, f"Next: {command}"]
