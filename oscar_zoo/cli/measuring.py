"""`eval`: open the artifact, load the model, measure, and show the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oscar_zoo.app import targets
from oscar_zoo.app.artifact_model import model_for
from oscar_zoo.app.artifacts import open_artifact
from oscar_zoo.app.progress import SILENT
from oscar_zoo.app.serve_artifact import with_folder
from oscar_zoo.app.sources import Sources
from oscar_zoo.cli.loading import load_for, with_overrides
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.progress import current
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.phases import Phase, Progress
from oscar_zoo.registry.model_names import serving_recipe

if TYPE_CHECKING:
    from oscar_zoo.evaluate.run import EvalReport

PHASES = (Phase("load", "", 1), Phase("measure", "sequences", 9))
"""Of `measure`; the seconds are shares."""
LONGEST = 2048
"""Tokens of a sequence when the user does not say."""
NAMES = {
    "bf16": "BF16",
    "int2": "INT2, no transform",
    "int2-hadamard": "INT2, Hadamard",
    "int2-hadamard-clip": "INT2, Hadamard, clipped",
    "artifact": "INT2, this artifact",
}


def measure(
    artifact: str,
    model: str | None,
    tasks: Sequence[str],
    data: str,
    choices: Mapping[str, Any],
    progress: Progress,
    *,
    quiet: bool = False,
) -> EvalReport:
    """Run `eval`; `choices` holds the options of the command that pass through."""
    from oscar_zoo.evaluate.run import evaluate
    from oscar_zoo.evaluate.texts import read_text
    from oscar_zoo.models.memory import memory_errors

    text = read_text(data, "validation")
    opened = open_artifact(targets.parse(artifact), Sources(choices["hubs"]), SILENT)
    choice = model_for(opened, model, current(), again=with_folder("eval", artifact))
    progress(0, 0, "load")
    loaded = load_for(choice, choices, longest=choices["length"] or LONGEST)
    for note in loaded.notes:
        terminal.note(f"note: {note}", quiet=quiet)
    recipe = opened.recipe or serving_recipe(choice, loaded.block.geometry)
    if opened.verified.k is None or opened.verified.v is None:
        raise UsageError(
            f"{artifact} has only one side; a cache needs K and V.",
            hint="give the folder that holds both",
        )
    sizes = {
        key: choices[key] for key in ("windows", "length", "answers") if choices[key] is not None
    }
    with memory_errors(loaded.block.id, loaded.device):
        return evaluate(
            loaded,
            text,
            tasks=tuple(tasks),
            artifact=(opened.verified.k, opened.verified.v),
            recipe=with_overrides(recipe, clip=choices["clip"]),
            progress=lambda done, total, unit: progress(done, total, "measure"),
            **sizes,
        )


def print_report(report: EvalReport, data: str) -> None:
    """One line per cache, with the change against BF16; `data` is the text that was measured on."""
    facts = report.to_json()
    rows = facts["rows"]
    base = rows[0]["perplexity"]
    with_recall = any(row["recall"] is not None for row in rows)
    columns = (["PERPLEXITY", "vs BF16"] if base is not None else []) + (
        ["RECALL"] if with_recall else []
    )
    table = terminal.table("CACHE", "BITS", *columns, right=(1, 2, 3, 4))
    for row in rows:
        cells = [NAMES.get(row["cache"], row["cache"]), f"{row['bits_per_element']:.2f}"]
        if base is not None:
            value = row["perplexity"]
            cells += [
                f"{value:,.3f}",
                "" if row is rows[0] else f"{100 * (value / base - 1):+,.1f} %",
            ]
        if with_recall:
            cells.append(f"{row['recall']:.1%}")
        table.add_row(*cells)
    terminal.out().print(table)
    if base is not None:
        cut = facts["tasks"]["perplexity"]
        text = (
            f"{cut['windows']} window(s) of {cut['length']:,} tokens of {terminal.clean(data)}, all"
            " positions"
        )
        terminal.out().print(f"Perplexity of {text}; other text or windows give other numbers")
