"""`oscar-zoo eval`: how good an INT2 cache is, measured in process."""

from __future__ import annotations

import click

from oscar_zoo.cli import options, render

TASKS = ("perplexity", "recall")


@click.command("eval")
@click.argument("artifact", metavar="NAME|DIR")
@click.option("--model", metavar="MODEL", help="Model folder, zoo name or hub id. [default: the artifact's base model]")
@click.option("--task", "tasks", type=click.Choice(TASKS), multiple=True, help="May be repeated. [default: both]")
@click.option(
    "--data", default="manuals", show_default=True, metavar="FILE|NAME", help="Text file, or a text known by name."
)
@click.option("--windows", type=click.IntRange(1), metavar="N", help="Text windows for perplexity. [default: 6]")
@click.option("--length", type=click.IntRange(2), metavar="N", help="Tokens of a window. [default: up to 2048]")
@click.option("--answers", type=click.IntRange(1), metavar="N", help="Recall questions. [default: 64]")
@click.option("--clip", metavar="K,V", help="Clip ratios to use in place of the recipe's.")
@options.dtype_option
@click.option("--revision", metavar="COMMIT", help="Commit of a model on a hub.")
@options.hubs_option
@options.devices_option
@options.stream_option
@options.quiet_option
@options.json_option
def command(
    artifact: str, model: str | None, tasks: tuple[str, ...], data: str, quiet: bool, as_json: bool, **choices: object
) -> None:
    """Measure a cache against BF16, plain INT2 and Hadamard INT2, with the model loaded in this process.

    Perplexity and recall use the sink, recent and INT2 layout exactly at every query position.

    \b
    Examples:
      oscar-zoo eval ./my-rotation --model ./my-model --task perplexity --data text.txt
      oscar-zoo eval Qwen3-8B --json
    """
    from oscar_zoo.cli.loading import require_compute
    from oscar_zoo.cli.measuring import measure, print_report

    require_compute()
    with render.progress("", enabled=not (quiet or as_json)) as advance:
        report = measure(artifact, model, tasks or TASKS, data, choices, advance, quiet=quiet or as_json)
    if as_json:
        render.emit_json(report.to_json())
    else:
        print_report(report)
