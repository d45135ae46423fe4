"""`oscar-zoo merge-moments`: several captures as one."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("merge-moments")
@click.argument(
    "files", metavar="MOMENTS...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File to write.",
)
@options.quiet_option
@options.json_option
def command(files: tuple[Path, ...], output: Path, quiet: bool, as_json: bool) -> None:
    """Add up captures of different texts.

    All must be of one model. Sequences that are in two files would count twice and are refused.

    \b
    Examples:
      oscar-zoo merge-moments monday.safetensors tuesday.safetensors --output both.safetensors
      oscar-zoo fit both.safetensors --method wush
    """
    from oscar_zoo.app.fit import merge_moments
    from oscar_zoo.cli.pasting import typed

    merged = merge_moments(files, output)
    if as_json:
        facts = {"schema": "oscar-zoo.merge/1", "path": typed(output), "sha256": merged.sha256}
        counts = {"size": merged.size, "tokens": merged.tokens, "notes": list(merged.notes)}
        terminal.emit_json(facts | counts)
        return
    size = terminal.megabytes(merged.size)
    terminal.out().print(
        f"Saved {terminal.clean(typed(output))}  {merged.tokens:,} tokens, {size} "
        f" sha256:{merged.sha256}"
    )
    for note in merged.notes:
        terminal.note(f"note: {note}", quiet=quiet)
