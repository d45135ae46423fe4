"""What servers answered, beside the reference: a table, what is wrong below it, and rows for a CSV
file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.app.evaluate_server import ServerEvaluation
    from oscar_zoo.app.server_answers import ServerFailure
    from oscar_zoo.evaluate.server_comparison import ComparisonRow, Perplexities


def print_rows(model: str, rows: Sequence[ComparisonRow]) -> None:
    """A line per server, then every violation."""
    console = terminal.out()
    columns = (
        "PERPLEXITY",
        "REFERENCE",
        "DIFF",
        "AFTER A HIT",
        "DIFF",
        "RECALL",
        "ALONE",
        "REFERENCE",
        "",
    )
    table = terminal.table(
        "CHUNK", "PAGE", "RADIX", "TP", *columns, right=(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    )
    for row in rows:
        facts = row.facts
        head = [
            str(facts.chunk),
            str(facts.page_size),
            "on" if facts.radix else "off",
            str(facts.tp),
        ]
        cells = [*_cells(row.cold), _reference(row.cold), _difference(row.cold), *_cells(row.warm)]
        mark = terminal.MARKS["failed" if row.violations else "ok"]
        table.add_row(*head, *cells, _difference(row.warm), *_recall(row), mark)
    console.print(terminal.clean(model))
    console.print(table)
    exact = next((row.cold.exact for row in rows if row.cold is not None), None)
    if exact is not None:
        console.print(f"Without quantization the perplexity is {exact:,.4f}.")
    for row in rows:
        for violation in row.violations:
            console.print(
                f"chunk {row.facts.chunk}, page {row.facts.page_size}: {terminal.clean(violation)}"
            )


def print_failures(failures: Sequence[ServerFailure]) -> None:
    """A line on stderr for every server that gave no answers."""
    for one in failures:
        message = f"{one.variant}: {one.error.message}"
        terminal.print_error(one.error.code, message, one.error.hint, as_json=False)


def to_json(found: ServerEvaluation) -> dict[str, Any]:
    """The JSON of `eval --engine sglang`."""
    questions = found.questions
    return {
        "schema": "oscar-zoo.eval-server/1",
        "model": found.model,
        "artifact": {"name": found.artifact.label, "digest": found.artifact.digest},
        "device": found.device,
        "recipe": found.recipe.model_dump(mode="json"),
        "texts": len(questions.texts),
        "length": questions.longest,
        "shared_tokens": questions.shared,
        "answers": sum(len(talk.answers) for talk in questions.conversations),
        "servers": [row.to_json() for row in found.rows],
        "failures": [
            {"server": str(one.variant), "error": one.error.message} for one in found.failures
        ],
    }


def to_csv(rows: Sequence[ComparisonRow]) -> str:
    """One line per server; numbers in full, empty where there is none."""
    flat = [_flat(row.to_json()) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(flat[0]) if flat else ["chunk"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    parts = {
        "perplexity": ("server", "reference", "deviation", "exact"),
        "perplexity_after_hit": ("server", "reference", "deviation", "exact"),
        "recall": ("answers", "talking", "alone", "reference"),
    }
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in parts:
            found |= {f"{name}_{part}": (value or {}).get(part) for part in parts[name]}
        else:
            found[name] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return found


def _cells(found: Perplexities | None) -> list[str]:
    return ["-" if found is None else f"{found.server:,.4f}"]


def _reference(found: Perplexities | None) -> str:
    return "-" if found is None else f"{found.reference:,.4f}"


def _difference(found: Perplexities | None) -> str:
    return "-" if found is None else f"{100 * found.deviation:+.3f} %"


def _recall(row: ComparisonRow) -> list[str]:
    recall = row.recall
    if recall is None:
        return ["-", "-", "-"]
    return [
        "-" if right is None else f"{right} of {recall.answers}"
        for right in (recall.talking, recall.alone, recall.reference)
    ]
