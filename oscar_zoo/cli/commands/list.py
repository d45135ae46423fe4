"""`oscar-zoo list`: what can be had and what is here. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.registry.row_order import FILTERS, SORTS


@click.command("list")
@click.option("--installed", is_flag=True, help="Only artifacts in the local store.")
@click.option(
    "--for",
    "model",
    metavar="MODEL",
    help="Only artifacts whose rotations have this model's name.",
    shell_complete=completing.names,
)
@click.option(
    "--family",
    metavar="NAME",
    help="Only models of this family; the beginning of its name is enough.",
    shell_complete=completing.families,
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="KEY=PATTERN",
    help="Only artifacts that fit, such as method=wush or family='Qwen3*'. Can be repeated. Keys:"
    f" {', '.join(FILTERS)}.",
)
@click.option(
    "--sort",
    "order",
    type=click.Choice(SORTS),
    default="name",
    show_default=True,
    help="Best first: the highest GPQA or recall with INT2, the smallest change of perplexity or"
    " size. Unknown values come last.",
)
@options.offline_option
@options.hubs_option
@options.json_option
def command(
    installed: bool,
    model: str | None,
    family: str | None,
    filters: tuple[str, ...],
    order: str,
    offline: bool,
    hubs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the artifacts that can be had, and what is installed.

    Hubs that do not answer are named; what this package knows of them is shown all the same. With
    --hub only what those hubs have is shown; it counts as installed when the local store has the
    same bytes.

    \b
    Examples:
      oscar-zoo list
      oscar-zoo list --for Qwen/Qwen3-8B
      oscar-zoo list --family Qwen3.5
      oscar-zoo list --sort gpqa --filter family='Qwen3*'
      oscar-zoo list --hub file:/srv/zoo --json
    """
    from oscar_zoo.app.listing import ListRequest, listing
    from oscar_zoo.cli.render.listing import emit_listing, print_listing
    from oscar_zoo.registry.hubs.address import Sources

    sources = Sources(hubs, offline=offline)
    request = ListRequest(sources, installed, model, family, filters, order)
    found = listing(request)
    if as_json:
        emit_listing(found)
    else:
        print_listing(found, request)
