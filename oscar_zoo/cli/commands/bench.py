"""`oscar-zoo bench`: what an INT2 cache does for the speed of a server, measured on this
machine."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import completing, options


@click.group("bench")
def command() -> None:
    """Measure on this machine.

    \b
    Examples:
      oscar-zoo bench serve Qwen3-8B
      oscar-zoo bench serve --dummy-weights Qwen3-8B --batch 1 --context 100000
      oscar-zoo bench load --dummy-weights Qwen3-8B --clients 200 --seconds 600
    """


@command.command(
    "serve", short_help="Compare stock SGLang with a BF16 cache and with an INT2 cache."
)
@click.argument(
    "artifact", metavar="[NAME|DIR]", required=False, shell_complete=completing.names_or_paths
)
@options.engine_flags_argument
@click.option(
    "--batch", default="1,16", show_default=True, metavar="N,...", help="Requests at the same time."
)
@click.option(
    "--context",
    default="8000,30000",
    show_default=True,
    metavar="N,...",
    help="Tokens of a prompt.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(8, 100_000),
    default=96,
    show_default=True,
    metavar="N",
    help="Tokens every request generates.",
)
@click.option(
    "--job",
    metavar="NxPROMPTxANSWER",
    help=(
        "Also time N requests that all come at once, such as 64x30000x512, until the last is"
        " answered."
    ),
)
@click.option(
    "--turns",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    metavar="N",
    help=(
        "Turns of the job: every request goes on as a conversation, 64 tokens longer with each"
        " turn."
    ),
)
@click.option(
    "--dummy-weights",
    metavar="NAME|DIR",
    help=(
        "Measure a model of this shape with random weights: a name of the zoo, or a folder with a"
        " config.json."
    ),
)
@options.served_model_options
@click.option(
    "--baseline",
    metavar="BACKEND",
    help="Attention backend of the BF16 side. [default: flashinfer; torch_native on a CPU]",
)
@click.option(
    "--csv",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the figures to this file.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Also draw them; needs matplotlib.",
)
@options.start_timeout_option("How long the start of an engine may take, each case, and the job.")
@options.offline_option
@options.hubs_option
@options.device_option
@options.quiet_option
@options.json_option
def serve_command(
    artifact: str | None, engine_flags: tuple[str, ...], offline: bool, **choices: object
) -> int:
    """Start SGLang with a BF16 cache, then with an INT2 cache, and send both the same prompts.

    For every batch and context: the time until the last request of the batch has its first token,
    milliseconds per token (median over the last three quarters of the new tokens, while all
    requests run), tokens per second of the whole batch, and how many tokens the cache holds. Before
    a case is timed, a batch of the same shape runs, so that compiling is not counted. Prompts are
    random tokens; the prefix cache is off, unless --turns asks for conversations.

    The artifact is found and verified as for oscar-zoo serve. With --dummy-weights nothing needs to
    be there: weights are random, and without an artifact the rotation is a Hadamard matrix. The
    speed depends on neither.

    Everything after -- goes to both engines, except flags that would make them differ. A side that
    fails is reported and the other still runs; the exit code is 1 then.

    \b
    Examples:
      oscar-zoo bench serve Qwen3-8B --csv figures.csv --plot figures.png
      oscar-zoo bench serve --dummy-weights Qwen3-8B --batch 1 --context 100000
      oscar-zoo bench serve --dummy-weights Qwen3-8B --job 64x30000x512
      oscar-zoo bench serve --dummy-weights Qwen3-8B --job 64x16000x256 --turns 2
      oscar-zoo bench serve --dummy-weights ./my-model -- --tp=2 --mem-fraction-static=0.8
    """
    if offline:
        options.go_offline()  # before the libraries below are imported
    from oscar_zoo.cli.benching import BenchRequest, bench

    if artifact is not None and artifact.startswith(
        "-"
    ):  # click cannot tell what stood behind the --
        engine_flags, artifact = (artifact, *engine_flags), None
    return bench(BenchRequest(artifact=artifact, extra=engine_flags, **choices))  # type: ignore[arg-type]


@command.command(
    "load", short_help="Put many clients on an INT2 server, some of which hang up, and end it."
)
@click.argument(
    "artifact", metavar="[NAME|DIR]", required=False, shell_complete=completing.names_or_paths
)
@options.engine_flags_argument
@click.option(
    "--clients", type=click.IntRange(1, 2000), default=200, show_default=True, metavar="N"
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
@click.option(
    "--dummy-weights",
    metavar="NAME|DIR",
    help="A model of this shape with random weights, as for bench serve.",
)
@options.served_model_options
@options.start_timeout_option("How long the start may take, and the answer to one request.")
@options.hubs_option
@options.device_option
@options.quiet_option
@options.json_option
def load_command(artifact: str | None, engine_flags: tuple[str, ...], **choices: object) -> int:
    """Start an INT2 server, let many streaming clients work with it, and end it with SIGTERM.

    Every client sends one request after the other; some hang up while theirs waits, is prefilled,
    or streams. The exit code is 1 when a request fails whose client did not hang up, memory of the
    processes or of the GPU grows, a token slot stays taken when all is over, the same prompts have
    other answers afterwards, or SIGTERM cuts off a running request, leaves /health inviting more,
    or does not end the server.

    \b
    Examples:
      oscar-zoo bench load Qwen3-8B
      oscar-zoo bench load --dummy-weights Qwen3-8B --clients 200 --seconds 600 --json
    """
    from oscar_zoo.cli.load_testing import LoadRequest, load_test

    if artifact is not None and artifact.startswith(
        "-"
    ):  # click cannot tell what stood behind the --
        engine_flags, artifact = (artifact, *engine_flags), None
    return load_test(LoadRequest(artifact=artifact, extra=engine_flags, **choices))  # type: ignore[arg-type]
