"""`oscar-zoo card`: the model card of an artifact or of a hub. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import completing, options


@click.command("card")
@click.argument(
    "artifact", metavar="[NAME|DIR]", required=False, shell_complete=completing.names_or_paths
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write, such as README.md. What others wrote into it stays.",
)
@options.offline_option
@options.hubs_option
@options.json_option
def command(
    artifact: str | None, output: Path | None, offline: bool, hubs: tuple[str, ...], as_json: bool
) -> None:
    """Write the card of one artifact, or of a hub: metadata that hubs read, with scores, and a
    section with quality, commands, calibration, licence and citation.

    Only what stands between two markers is replaced, in the metadata and in the text, as publish
    does. A key of the metadata that the owner has is not written. With --output, the report that
    compute left beside the folder is copied to the card and shown in it.

    \b
    Examples:
      oscar-zoo card ./rotation --output ./rotation/README.md
      oscar-zoo card Qwen3-8B
      oscar-zoo card --hub hf:my-org/zoo --output README.md
    """
    from oscar_zoo.app.card import CardRequest, make_card
    from oscar_zoo.cli.render.card import emit_card, print_card
    from oscar_zoo.registry.hubs.address import Sources
    from oscar_zoo.registry.targets import parse

    target = None if artifact is None else parse(artifact)
    made = make_card(CardRequest(target, Sources(hubs, offline=offline), output))
    if as_json:
        emit_card(made)
    else:
        print_card(made)
