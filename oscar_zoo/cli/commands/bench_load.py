"""`oscar-zoo bench load`: many clients on one INT2 server."""

from __future__ import annotations

import signal
from typing import Any

import click

from oscar_zoo.cli import options, parsing
from oscar_zoo.cli.engine_flags import FlagsCommand
from oscar_zoo.cli.render import terminal


@click.command(
    "load",
    cls=FlagsCommand,
    short_help="Put many clients on an INT2 server, some of which hang up, and end it.",
)
@options.benchmarked_argument
@options.engine_flags_argument
@click.option(
    "--clients",
    type=click.IntRange(1, 2000),
    default=200,
    show_default=True,
    metavar="N",
    help="Clients at work at the same time.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86_400),
    default=600,
    show_default=True,
    metavar="N",
    help="How long clients begin new requests.",
)
@click.option(
    "--context",
    type=click.IntRange(2, 1 << 20),
    default=4000,
    show_default=True,
    metavar="N",
    help="Tokens of the longest prompt; they are mixed, and most share a prefix with others.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1, 100_000),
    default=256,
    show_default=True,
    metavar="N",
    help="Tokens of the longest answer.",
)
@click.option(
    "--aborts",
    type=click.FloatRange(0, 0.9),
    default=0.2,
    show_default=True,
    metavar="SHARE",
    help="Of the requests whose client hangs up.",
)
@click.option(
    "--growth",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    metavar="MIB",
    help="How much more memory the end of the run may take than its middle.",
)
@options.dummy_weights_option("A model of this shape with random weights, as for bench serve.")
@options.served_model_options
@options.start_timeout_option("How long the start may take, and the answer to one request.")
@options.offline_option
@options.hubs_option
@options.device_option
@options.quiet_option
@options.json_option
def load_command(
    artifact: str | None,
    engine_flags: tuple[str, ...],
    clients: int,
    seconds: float,
    context: int,
    new_tokens: int,
    aborts: float,
    growth: int,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Start an INT2 server, let many streaming clients work with it, and end it with SIGTERM.

    Every client sends one request after the other; some hang up while theirs waits, is prefilled,
    or streams. The exit code is 1 when a request fails whose client did not hang up, memory of the
    processes or of the GPU grows, a token slot stays taken when all is over, the same prompts have
    other answers afterwards, or SIGTERM cuts off a running request, leaves /health inviting more,
    or does not end the server. Ctrl-C or SIGTERM ends the run early and keeps what was measured.

    \b
    Examples:
      oscar-zoo bench load Qwen3-8B
      oscar-zoo bench load --dummy-weights Qwen3-8B --clients 200 --seconds 600 --json
    """
    from oscar_zoo.app.bench_load import LoadRequest, load
    from oscar_zoo.bench.load_clients import Load
    from oscar_zoo.cli.pasting import typed_again
    from oscar_zoo.cli.render.load import print_load, print_stop
    from oscar_zoo.cli.render.progress import TerminalObserver

    if choices["offline"]:
        options.go_offline()  # before the libraries below are imported
    artifact, engine_flags = parsing.apart(artifact, engine_flags)
    work = Load(clients, seconds, context, new_tokens, aborts)
    request = LoadRequest(
        work,
        artifact,
        growth=growth << 20,
        extra=engine_flags,
        again=typed_again("--model", "FOLDER"),
        **choices,
    )
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = load(request, observer)
    terminal.emit_json(report.to_json()) if as_json else print_load(report)
    print_stop(report)
    if report.stopped is not None:
        return 128 + signal.Signals[report.stopped]
    return 1 if report.violations else 0
