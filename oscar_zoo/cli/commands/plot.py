"""`oscar-zoo plot`: draw the report of a fit again. Needs torch for moments files only."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("plot")
@click.argument("source", metavar="REPORT.json|MOMENTS|DIR")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html|.png",
    help="File to write. [default: the page, beside the source]",
)
@options.json_option
def command(source: str, output: Path | None, as_json: bool) -> None:
    """Draw a report again from its numbers, or the spectra of a moments file.

    The page is one self-contained HTML file; the picture shows the same. DIR is an
    artifact's folder, with the report beside it, or a folder that holds one report or moments file.

    \b
    Examples:
      oscar-zoo plot ./Qwen3-8B/seq8192_prompt31_group128-wush.report.json
      oscar-zoo plot moments.safetensors --output spectra.png
    """
    from oscar_zoo.app.report import ReportRequest, draw
    from oscar_zoo.cli.pasting import typed

    drawn = draw(ReportRequest(source, output))
    if as_json:
        facts = {"schema": "oscar-zoo.plot/1", "source": typed(drawn.source)}
        terminal.emit_json(facts | {"path": typed(drawn.path), "report": drawn.data.to_json()})
    else:
        terminal.out().print(f"Saved {terminal.clean(typed(drawn.path))}")
