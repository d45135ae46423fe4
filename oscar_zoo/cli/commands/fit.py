"""`oscar-zoo fit`: another method from the moments of an earlier capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oscar_zoo.app.compute_request import METHODS
from oscar_zoo.cli import options, parsing
from oscar_zoo.cli.render import terminal


@click.command("fit")
@click.argument("moments", metavar="MOMENTS", type=click.Path(path_type=Path))
@click.option(
    "--method",
    type=click.Choice(METHODS[1:]),
    required=True,
    help="How to fit; wush-tuned needs the model: compute.",
)
@click.option(
    "--bits",
    metavar="4",
    help="Codes of 4 bits everywhere; to choose layers needs the model: compute. [default: 2 bits]",
)
@options.output_dir_option
@options.recorded_clip_option("the zoo's")
@options.group_size_option("the zoo's")
@options.force_option
@options.quiet_option
@options.json_option
def command(
    moments: Path,
    method: str,
    clip: str | None,
    bits: str | None,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Fit another rotation from MOMENTS, the file that compute writes beside an artifact. Needs no
    model and no text.

    \b
    Examples:
      oscar-zoo fit ./Qwen3-8B/seq16384_prompt4_group128.moments.safetensors --method wush
      oscar-zoo fit merged.safetensors --method oscar --output-dir ./for-oscar-servers
    """
    from oscar_zoo.app.fit import FitRequest, run
    from oscar_zoo.cli.pasting import measuring, saved, typed
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.registry.summary import artifact_summary

    request = FitRequest(
        moments, method, parsing.parse_clip(clip), bits=parsing.parse_bits(bits), **choices
    )
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        result = run(request, observer)
    if as_json:
        facts = {"schema": "oscar-zoo.fit/1", "path": typed(result.path)}
        terminal.emit_json(facts | artifact_summary(result.manifest))
        return
    terminal.out().print(saved(result.path, result.manifest))
    terminal.note(measuring(result.path, result.manifest.model.id), quiet=quiet)
