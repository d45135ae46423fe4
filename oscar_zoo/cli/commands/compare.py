"""`oscar-zoo compare`: two artifacts side by side. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options


@click.command("compare")
@click.argument("artifact", metavar="NAME|DIR", shell_complete=completing.names_or_paths)
@click.argument("other", metavar="NAME|DIR", shell_complete=completing.names_or_paths)
@options.offline_option
@options.hubs_option
@options.json_option
def command(artifact: str, other: str, offline: bool, hubs: tuple[str, ...], as_json: bool) -> None:
    """Put two artifacts side by side: how good they are, what they take, how they were made.

    A star marks what differs. Scores come with their errors and are not subtracted from each other,
    since they may be of different questions.

    \b
    Examples:
      oscar-zoo compare Qwen3-8B Qwen3-32B
      oscar-zoo compare Qwen3-8B ./rotation
      oscar-zoo compare ./one ./two --json
    """
    from oscar_zoo.app.compare import compare
    from oscar_zoo.cli.render.comparison import emit_comparison, print_comparison

    found = compare(artifact, other, hubs=hubs, offline=offline)
    if as_json:
        emit_comparison(found)
    else:
        print_comparison(found)
