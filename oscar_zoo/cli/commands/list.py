"""`oscar-zoo list`: what can be had and what is here. Needs no torch."""

from __future__ import annotations

from typing import Any

import click

from oscar_zoo.cli import options, render


@click.command("list")
@click.option("--installed", is_flag=True, help="Only artifacts in the local store.")
@click.option("--for", "model", metavar="MODEL", help="Only artifacts whose rotations have this model's name.")
@options.offline_option
@options.hubs_option
@options.json_option
def command(installed: bool, model: str | None, offline: bool, hubs: tuple[str, ...], as_json: bool) -> None:
    """Show the artifacts that can be had, and what is installed.

    Hubs that do not answer are named; what this package knows of them is shown all the same.

    \b
    Examples:
      oscar-zoo list
      oscar-zoo list --for Qwen/Qwen3-8B
      oscar-zoo list --hub file:/srv/zoo --json
    """
    from oscar_zoo.cli.browsing import look
    from oscar_zoo.registry.catalog import Catalog
    from oscar_zoo.registry.store import Store
    from oscar_zoo.registry.summary import list_artifacts

    catalog = Catalog.packaged()
    views, troubles = ([], []) if installed else look(hubs, offline=offline)
    rows = list_artifacts(catalog, Store().installed(), views)
    if model is not None:
        recipe = catalog.recipe(model)
        name = (recipe.name if recipe else model.rsplit("/", 1)[-1]).casefold()
        rows = [row for row in rows if row["model"].casefold() == name]
    if installed:
        rows = [row for row in rows if row["status"] == "installed"]
    named = {row["model"].casefold() for row in rows}
    recipes = [r.name for r in catalog.recipes() if r.name.casefold() not in named] if not (model or installed) else []
    if as_json:
        notes = [trouble.message for trouble in troubles]
        facts = {"artifacts": rows, "recipes_without_artifact": recipes, "notes": notes}
        render.emit_json({"schema": "oscar-zoo.list/1"} | facts)
        return
    _print(rows, recipes)
    for trouble in troubles:
        render.note(f"note: {trouble.message}")
    if model is not None and not rows:
        close = () if recipe else catalog.close_matches(model)
        render.note(f"No artifacts for {model}." + (f" Did you mean {' or '.join(close)}?" if close else ""))
    elif not rows:
        render.note("No artifacts.")


def _print(rows: list[dict[str, Any]], recipes: list[str]) -> None:
    console = render.out()
    if rows:
        narrow = render.is_narrow(92)  # names and tags are there to be copied: leave numbers out before they wrap
        numbers = () if narrow else ("FMT", "BITS")
        table = render.table("MODEL", "TAG", *numbers, "GPQA BF16 → INT2", "STATUS", right=() if narrow else (2, 3))
        for row in rows:
            bits = f"{row['bits_per_element']:.2f}" if row["bits_per_element"] else "-"
            state = row["status"] if row["state"] == "active" else f"{row['status']}, {row['state']}"
            shape = () if narrow else (row["format_version"] or "-", bits)
            table.add_row(*map(render.clean, (row["model"], row["tag"], *shape, _gpqa(row["scores"]), state)))
        console.print(table)
    if any(score["reporter"] == "upstream" for row in rows for score in row["scores"]):
        console.print("ᵘ reported upstream, number of runs unknown; see `oscar-zoo info NAME`")
    if recipes:
        console.print(f"Recipes without a published rotation (oscar-zoo compute): {', '.join(recipes)}")


def _gpqa(scores: list[dict[str, Any]]) -> str:
    score = next((s for s in scores if s["task"].casefold().startswith("gpqa")), None)
    if score is None or score["value"] is None:
        return render.NOT_REPORTED
    before = f"{score['baseline']:.2f}" if score["baseline"] is not None else "?"
    return f"{before} → {score['value']:.2f}" + (" ᵘ" if score["reporter"] == "upstream" else "")
