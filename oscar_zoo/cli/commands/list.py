"""`oscar-zoo list`: what can be had and what is here. Needs no torch."""

from __future__ import annotations

import os
from typing import Any

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal


@click.command("list")
@click.option("--installed", is_flag=True, help="Only artifacts in the local store.")
@click.option(
    "--for",
    "model",
    metavar="MODEL",
    help="Only artifacts whose rotations have this model's name.",
    shell_complete=completing.names,
)
@options.offline_option
@options.hubs_option
@options.json_option
def command(
    installed: bool, model: str | None, offline: bool, hubs: tuple[str, ...], as_json: bool
) -> None:
    """Show the artifacts that can be had, and what is installed.

    Hubs that do not answer are named; what this package knows of them is shown all the same. With
    --hub only what those hubs have is shown; it counts as installed when the local store has the
    same bytes.

    \b
    Examples:
      oscar-zoo list
      oscar-zoo list --for Qwen/Qwen3-8B
      oscar-zoo list --hub file:/srv/zoo --json
    """
    from oscar_zoo.registry.catalog import Catalog
    from oscar_zoo.registry.hub_queries import look
    from oscar_zoo.registry.known_names import aliased
    from oscar_zoo.registry.store import Store
    from oscar_zoo.registry.summary import list_artifacts

    catalog = Catalog.packaged()
    named_hubs = bool(hubs or os.environ.get("OSCAR_ZOO_HUB", "").strip())
    views, troubles = ([], []) if installed and not named_hubs else look(hubs, offline=offline)
    rows = list_artifacts(catalog, Store().installed(), views, only_hubs=named_hubs)
    if model is not None:
        recipe, version = (
            catalog.recipe(model),
            None if catalog.recipe(model) else aliased(model, views),
        )
        known = recipe.name if recipe else version.model if version else model.rsplit("/", 1)[-1]
        rows = [row for row in rows if row["model"].casefold() == known.casefold()]
        rows = [
            row
            for row in rows
            if version is None or row["tag"].casefold() == version.tag.casefold()
        ]
    if installed:
        rows = [row for row in rows if row["status"] == "installed"]
    named = {row["model"].casefold() for row in rows}
    chosen = bool(model or installed or named_hubs)
    recipes = (
        [] if chosen else [r.name for r in catalog.recipes() if r.name.casefold() not in named]
    )
    if as_json:
        notes = [trouble.message for trouble in troubles]
        facts = {"artifacts": rows, "recipes_without_artifact": recipes, "notes": notes}
        terminal.emit_json({"schema": "oscar-zoo.list/1"} | facts)
        return
    _print(rows, recipes)
    for trouble in troubles:
        terminal.note(f"note: {trouble.message}")
    if model is not None and not rows:
        close = () if recipe else catalog.close_matches(model)
        terminal.note(
            f"No artifacts for {model}." + (f" Did you mean {' or '.join(close)}?" if close else "")
        )
    elif not rows:
        terminal.note("No artifacts.")


_MEASURED = ("PERPLEXITY", "RECALL BF16 → INT2")


def _print(rows: list[dict[str, Any]], recipes: list[str]) -> None:
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
    from oscar_zoo.registry.measured import Measured

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
