"""`oscar-zoo search`: artifacts and models by words. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options


@click.command("search")
@click.argument(
    "words", metavar="WORD...", nargs=-1, required=True, shell_complete=completing.names
)
@options.offline_option
@options.hubs_option
@options.json_option
def command(words: tuple[str, ...], offline: bool, hubs: tuple[str, ...], as_json: bool) -> None:
    """Find artifacts, and models without one, that have every word.

    Words are looked for in names, aliases, families, methods, tasks of scores, status and digests;
    case does not matter. A word such as 7b or 0.6b is the size of a model.

    \b
    Examples:
      oscar-zoo search qwen3 wush
      oscar-zoo search gemma
      oscar-zoo search qwen 8b
      oscar-zoo search gpqa_diamond --hub hf:my-org/zoo --json
    """
    from oscar_zoo.app.search import search
    from oscar_zoo.cli.render.listing import emit_listing, print_found

    found = search(words, hubs=hubs, offline=offline)
    if as_json:
        emit_listing(found, "oscar-zoo.search/1")
    else:
        print_found(found, words)
