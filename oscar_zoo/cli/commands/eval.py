"""`oscar-zoo eval`: how good an INT2 cache is, measured in process, or in the server that runs
it."""

from __future__ import annotations

from typing import Any

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal

TASKS = ("perplexity", "recall")


@click.command("eval")
@click.argument("artifact", metavar="NAME|DIR", shell_complete=completing.names_or_paths)
@options.engine_flags_argument
@click.option(
    "--model",
    metavar="MODEL",
    help="Model folder, zoo name or hub id. [default: the artifact's base model]",
    shell_complete=completing.models,
)
@click.option(
    "--task",
    "tasks",
    type=click.Choice(TASKS),
    multiple=True,
    help="May be repeated. [default: both]",
)
@click.option(
    "--data",
    default="manuals",
    show_default=True,
    metavar="FILE|NAME",
    help="Text file, or a text known by name.",
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    metavar="N",
    help="Text windows for perplexity. [default: 6]",
)
@click.option(
    "--length",
    type=click.IntRange(2),
    metavar="N",
    help="Tokens of a window. [default: up to 2048; 2000 of a server]",
)
@click.option(
    "--answers",
    type=click.IntRange(1),
    metavar="N",
    help="Recall questions. [default: 64; 60 of a server]",
)
@click.option("--clip", metavar="K,V", help="Clip ratios to use in place of the recipe's.")
@options.dtype_option
@options.revision_option
@click.option(
    "--engine",
    type=click.Choice(["transformers", "sglang"]),
    default="transformers",
    show_default=True,
    help=(
        "sglang: measure the server itself, and compare it with this process. The options from"
        " --url on are for it."
    ),
)
@options.server_eval_options
@options.offline_option
@options.hubs_option
@options.devices_option
@options.stream_option
@options.quiet_option
@options.json_option
def command(
    artifact: str,
    engine_flags: tuple[str, ...],
    model: str | None,
    tasks: tuple[str, ...],
    data: str,
    engine: str,
    offline: bool,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Measure a cache against BF16, plain INT2 and Hadamard INT2, with the model loaded in this
    process.

    The artifact is a NAME, or a folder that begins with ./, ../, / or ~. A MODEL is found as for
    oscar-zoo compute.

    Perplexity and recall use the sink, recent and INT2 layout exactly at every query position.

    With --engine sglang the artifact is served by stock SGLang, and its perplexity is computed from
    the server's own log-probabilities, cold and behind a prefix-cache hit; recall is asked for in
    conversations of three turns that reuse the cache, and once more without reuse. The reference in
    this process has the same chunks. The exit code is 1 when they differ. Lists such as --chunk
    512,8192 start a server for every pair of values; --sweep is the whole list.

    \b
    Examples:
      oscar-zoo eval ./my-rotation --model ./my-model --task perplexity --data text.txt
      oscar-zoo eval Qwen3-8B --json
      oscar-zoo eval Qwen3-8B --engine sglang --chunk 512,8192 --csv servers.csv
      oscar-zoo eval Qwen3-8B --engine sglang --url http://127.0.0.1:30000
    """
    if offline:
        options.go_offline()  # before the libraries below are imported
    if engine == "sglang":
        from oscar_zoo.cli.server_eval import ServerEvalRequest, server_eval

        named = {
            "artifact": artifact,
            "model": model,
            "data": data,
            "tasks": tasks or TASKS,
            "extra": engine_flags,
        }
        return server_eval(ServerEvalRequest(**named, **choices, quiet=quiet, as_json=as_json))  # type: ignore[arg-type]
    options.refuse_server_options(choices, engine_flags)
    from oscar_zoo.app.devices import require_compute
    from oscar_zoo.cli.measuring import PHASES, measure, print_report
    from oscar_zoo.cli.render.progress import course

    require_compute()
    with course(PHASES, timed=False, enabled=not (quiet or as_json)) as advance:
        report = measure(
            artifact, model, tasks or TASKS, data, choices, advance, quiet=quiet or as_json
        )
    if as_json:
        terminal.emit_json(report.to_json())
    else:
        print_report(report, data)
    return 0
