"""`oscar-zoo leaderboard`: scores of a benchmark, best first. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options


@click.command("leaderboard")
@click.option(
    "--task",
    default="gpqa",
    show_default=True,
    metavar="NAME",
    help="A benchmark, or the beginning of its name; perplexity; recall.",
    shell_complete=completing.tasks,
)
@click.option("--measured", is_flag=True, help="Only what oscar-zoo itself measured.")
@options.offline_option
@options.hubs_option
@options.json_option
def command(task: str, measured: bool, offline: bool, hubs: tuple[str, ...], as_json: bool) -> None:
    """Rank artifacts by a score with an INT2 cache, beside BF16.

    Every line says who reports the score. What this tool measured is taken before what others say.
    A difference is shown only where both caches answered the same questions. Perplexity is ranked
    by its change over BF16.

    \b
    Examples:
      oscar-zoo leaderboard
      oscar-zoo leaderboard --task perplexity --measured
      oscar-zoo leaderboard --hub hf:my-org/zoo --json
    """
    from oscar_zoo.app.leaderboard import leaderboard
    from oscar_zoo.cli.render.leaderboard import emit_board, print_board

    board = leaderboard(task, measured=measured, hubs=hubs, offline=offline)
    if as_json:
        emit_board(board)
    else:
        print_board(board)
