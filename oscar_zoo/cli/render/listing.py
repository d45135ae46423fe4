"""What `list` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oscar_zoo.app.browse import Listing
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.measured import Measured

_MEASURED = ("PERPLEXITY", "RECALL BF16 → INT2")


def emit_listing(listing: Listing) -> None:
    """The JSON of `list`."""
    facts = {
        "artifacts": [dict(row) for row in listing.rows],
        "recipes_without_artifact": list(listing.recipes),
        "notes": [error.message for error in listing.unreachable],
    }
    terminal.emit_json({"schema": "oscar-zoo.list/1"} | facts)


def print_listing(listing: Listing, model: str | None) -> None:
    """The table of `list`; `model` is what was asked for, if anything."""
    _print(listing.rows, listing.recipes)
    for error in listing.unreachable:
        terminal.note(f"note: {error.message}")
    if listing.rows:
        return
    if model is None:
        terminal.note("No artifacts.")
        return
    question = f" Did you mean {' or '.join(listing.close)}?" if listing.close else ""
    terminal.note(f"No artifacts for {model}.{question}")


def _print(rows: Sequence[Mapping[str, Any]], recipes: Sequence[str]) -> None:
    console = terminal.out()
    if rows:
        # Names and tags are there to be copied: leave numbers out before they wrap.
        narrow, measured = (
            terminal.is_narrow(92),
            any(row["measured"] for row in rows) and not terminal.is_narrow(128),
        )
        numbers = (*(() if narrow else ("FMT", "BITS")), *(_MEASURED if measured else ()))
        right = tuple(range(2, 2 + len(numbers)))
        table = terminal.table("MODEL", "TAG", *numbers, "GPQA BF16 → INT2", "STATUS", right=right)
        for row in rows:
            bits = f"{row['bits_per_element']:.2f}" if row["bits_per_element"] else "-"
            state = (
                row["status"] if row["state"] == "active" else f"{row['status']}, {row['state']}"
            )
            shape = () if narrow else (row["format_version"] or "-", bits)
            figures = _figures(row["measured"]) if measured else ()
            cells = (row["model"], row["tag"], *shape, *figures, _gpqa(row["scores"]), state)
            table.add_row(*map(terminal.clean, cells))
        console.print(table)
        if measured:
            console.print(
                "PERPLEXITY and RECALL: measured on held-out text when it was made; see `oscar-zoo"
                " info NAME`"
            )
    if any(score["reporter"] == "upstream" for row in rows for score in row["scores"]):
        terminal.prose("ᵘ reported upstream, number of runs unknown; see `oscar-zoo info NAME`")
    if recipes:
        terminal.prose(
            f"Recipes without a published rotation (oscar-zoo compute): {', '.join(recipes)}"
        )


def _figures(measured: dict[str, Any] | None) -> tuple[str, str]:
    found = Measured.model_validate(measured) if measured else None
    return (found.short_perplexity if found else None) or "-", (
        found.short_recall if found else None
    ) or "-"


def _gpqa(scores: list[dict[str, Any]]) -> str:
    score = next((s for s in scores if s["task"].casefold().startswith("gpqa")), None)
    if score is None or score["value"] is None:
        return terminal.NOT_REPORTED
    before = f"{score['baseline']:.2f}" if score["baseline"] is not None else "?"
    return f"{before} → {score['value']:.2f}" + (" ᵘ" if score["reporter"] == "upstream" else "")
