"""What `list` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oscar_zoo.app.listing import Listing, ListRequest
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry import row_order
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.recipe import ModelRecipe

_SHAPE = ("FMT", "BITS")
_MEASURED = ("PERPLEXITY", "RECALL BF16 → INT2")


def emit_listing(listing: Listing, schema: str = "oscar-zoo.list/1") -> None:
    """The JSON of `list` and `search`."""
    facts = {
        "artifacts": [dict(row) for row in listing.rows],
        "recipes_without_artifact": [recipe.name for recipe in listing.recipes],
        "notes": [error.message for error in listing.unreachable],
        "warnings": list(listing.warnings),
    }
    terminal.emit_json({"schema": schema} | facts)


def print_listing(listing: Listing, request: ListRequest) -> None:
    """The table of `list`."""
    _print(listing.rows)
    _print_recipes(listing.recipes, by_name=request.family is not None)
    for error in listing.unreachable:
        terminal.note(f"note: {error.message}")
    if request.sources.by_environment:
        terminal.note(
            f"note: OSCAR_ZOO_HUB is set: only {request.sources.by_environment} is listed."
        )
    for warning in listing.warnings:
        terminal.note(f"warning: {warning}")
    if listing.rows:
        return
    of = request.model or request.family
    found = no_artifacts(of) if of else "No artifacts."
    if request.filters:
        found = f"{found[:-1]} that fit {' and '.join(request.filters)}. See all: oscar-zoo list"
    terminal.note(found + _did_you_mean(listing))


def no_artifacts(of: str) -> str:
    """The sentence where none is known for a model or family."""
    return f"No artifacts for {of}."


def print_found(listing: Listing, words: Sequence[str]) -> None:
    """The table of `search`, and the models without an artifact that have the words."""
    _print(listing.rows)
    _print_recipes(listing.recipes, by_name=True)
    for error in listing.unreachable:
        terminal.note(f"note: {error.message}")
    if not listing.rows and not listing.recipes:
        terminal.note(f"Nothing has all of the words {' '.join(words)}.{_did_you_mean(listing)}")


def _did_you_mean(listing: Listing) -> str:
    return f" Did you mean {' or '.join(listing.close)}?" if listing.close else ""


def _print_recipes(recipes: Sequence[ModelRecipe], *, by_name: bool) -> None:
    """Models without a published rotation: their names, or only their families."""
    if not recipes:
        return
    named = [recipe.name if by_name else recipe.family for recipe in recipes]
    shown = ", ".join(sorted(dict.fromkeys(named), key=str.casefold))
    if by_name:
        terminal.prose(f"Recipes without a published rotation (oscar-zoo compute): {shown}")
    else:
        terminal.prose(
            f"Recipes without a published rotation (oscar-zoo compute): {len(recipes)} models of"
            f" the families {shown}; see `oscar-zoo list --family NAME`"
        )


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    console = terminal.out()
    if rows:
        measured = _MEASURED if any(row["measured"] for row in rows) else ()
        numbers = (*_SHAPE, *measured, "GPQA BF16 → INT2")
        right = tuple(range(2, 1 + len(numbers)))
        # Some column says how good a row is: what was measured goes only where GPQA is known.
        spare = (_SHAPE, _MEASURED) if any(map(row_order.gpqa, rows)) else (_SHAPE,)
        table = terminal.table("MODEL", "TAG", *numbers, "STATUS", right=right, spare=spare)
        for row in rows:
            bits = f"{row['bits_per_element']:.2f}" if row["bits_per_element"] else "-"
            state = (
                row["status"] if row["state"] == "active" else f"{row['status']}, {row['state']}"
            )
            figures = _figures(row["measured"]) if measured else ()
            shape = (row["format_version"] or "-", bits)
            cells = (row["model"], row["tag"], *shape, *figures, _gpqa(row), state)
            table.add_row(*map(terminal.clean, cells))
        console.print(table)
        if table.shows(_MEASURED[0], console):
            terminal.prose(
                "PERPLEXITY and RECALL: measured by oscar-zoo on held-out text; see `oscar-zoo info"
                " NAME`"
            )
        elif measured:
            terminal.prose(
                "PERPLEXITY and RECALL do not fit this terminal; see `oscar-zoo info NAME`"
            )
    if any(score["reporter"] == "upstream" for row in rows for score in row["scores"]):
        terminal.prose("ᵘ reported upstream, number of runs unknown; see `oscar-zoo info NAME`")


def _figures(measured: dict[str, Any] | None) -> tuple[str, str]:
    found = Measured.model_validate(measured) if measured else None
    return (found.short_perplexity if found else None) or "-", (
        found.short_recall if found else None
    ) or "-"


def _gpqa(row: Mapping[str, Any]) -> str:
    score = row_order.gpqa(row)
    if score is None:
        return terminal.NOT_REPORTED
    before = f"{score['baseline']:.2f}" if score["baseline"] is not None else "?"
    return f"{before} → {score['value']:.2f}" + (" ᵘ" if score["reporter"] == "upstream" else "")
