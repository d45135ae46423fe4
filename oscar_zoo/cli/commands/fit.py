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
    metavar="BITS",
    help=(
        "As for compute: 2 or 4 for all codes. A budget such as 2.75, and auto, are spent by"
        " measurement and need --model. [default: 2]"
    ),
)
@options.max_loss_option
@click.option("--model", metavar="MODEL", help="The model of MOMENTS, to choose bits with.")
@click.option(
    "--calib-data",
    metavar="SOURCE",
    help="With --model: the text that MOMENTS are of, whose held-out part bits are chosen with.",
)
@click.option("--allow-poor", is_flag=True, help="Write a result that fails its quality gates.")
@options.revision_option
@options.dtype_option
@options.devices_option
@options.stream_option
@options.offline_option
@options.output_dir_option
@options.recorded_clip_option("the recipe's")
@options.group_size_option("the recipe's")
@options.force_option
@options.quiet_option
@options.json_option
def command(
    moments: Path,
    method: str,
    clip: str | None,
    bits: str | None,
    max_loss: str | None,
    offline: bool,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Fit another rotation from MOMENTS, the file that compute writes beside an artifact. A
    folder stands for the file beside it or in it. Needs no model and no text, except to choose bits
    per layer and side.

    \b
    Examples:
      oscar-zoo fit ./Qwen3-8B/seq16384_prompt4_group128.moments.safetensors --method wush
      oscar-zoo fit merged.safetensors --method oscar --output-dir ./for-oscar-servers
      oscar-zoo fit merged.safetensors --method wush --bits 2.75 --model ./my-model
    """
    from oscar_zoo.app.fit import FitRequest, run
    from oscar_zoo.artifact.width_selection import WidthSelection
    from oscar_zoo.cli.pasting import measuring, saved, typed
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.cli.render.widths import width_lines
    from oscar_zoo.registry.entries import artifact_summary

    if offline:
        options.go_offline()
    request = FitRequest(
        moments,
        method,
        parsing.parse_clip(clip),
        bits=parsing.parse_bits(bits),
        max_loss=parsing.parse_percent(max_loss, "--max-loss"),
        **choices,
    )
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        result = run(request, observer)
    if as_json:
        facts = {"schema": "oscar-zoo.fit/1", "path": typed(result.path)}
        terminal.emit_json(facts | artifact_summary(result.manifest))
        return
    if (widths := WidthSelection.of(result.manifest.fit.selection)) is not None:
        for line in width_lines(widths):
            terminal.out().print(line)
    terminal.out().print(saved(result.path, result.manifest))
    terminal.note(measuring(result.path, result.manifest.model.id), quiet=quiet)
