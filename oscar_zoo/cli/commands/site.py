"""`oscar-zoo site`: a static catalogue of artifacts. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.hubs.table import FORMS


@click.command("site")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default=Path("site"),
    show_default=True,
    help="Folder of the site. A site that is there already is replaced.",
)
@click.option(
    "--hub",
    "hubs",
    multiple=True,
    metavar="HUB",
    help=f"Hub to show beside what this package knows: {FORMS}. Can be repeated. Without it no hub"
    " is asked.",
)
@click.option("--serve", is_flag=True, help="Then serve it on this machine until Ctrl-C.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="N",
    help="Port of --serve; 0 takes a free one.",
)
@options.offline_option
@options.quiet_option
@options.json_option
def command(
    output: Path,
    hubs: tuple[str, ...],
    serve: bool,
    port: int,
    offline: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build the zoo's page: a table of all artifacts, and one page for each with its quality, its
    charts and whether it fits a GPU.

    The files need no server, load nothing from elsewhere, and are the same for the same manifests.
    The charts of a hub in a folder also show the reports and eigenvalues that lie there.

    \b
    Examples:
      oscar-zoo site
      oscar-zoo site --serve
      oscar-zoo site --hub hf:my-org/zoo --output public
    """
    from oscar_zoo.app.site import SiteRequest, build
    from oscar_zoo.cli.render.site import emit_site, print_site

    built = build(SiteRequest(output, hubs, offline))
    if as_json:
        emit_site(built)
    else:
        print_site(built)
    if serve:
        from oscar_zoo.app.site_server import SiteServer

        with SiteServer(built.output, port) as server:
            if not quiet:
                terminal.note(f"Serving {server.url} on this machine only; Ctrl-C ends it.")
            server.run()
