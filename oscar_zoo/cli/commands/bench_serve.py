"""`oscar-zoo bench serve`: BF16 and FP8 caches against an INT2 cache."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.cli import options, parsing
from oscar_zoo.cli.engine_flags import FlagsCommand
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.saving import save_after_result
from oscar_zoo.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from oscar_zoo.bench.report import Report


@click.command(
    "serve", cls=FlagsCommand, short_help="Compare SGLang with BF16, FP8 and INT2 caches."
)
@options.benchmarked_argument
@options.engine_flags_argument
@click.option("--batch", metavar="N,...", help="Requests at the same time.  [default: 1,16]")
@click.option("--context", metavar="N,...", help="Tokens of a prompt.  [default: 8000,30000]")
@click.option(
    "--cases",
    metavar="NxPROMPT,...",
    help="Measure these, such as 1x100000,64x8000, in place of every batch with every context.",
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
    "--repeats",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    metavar="N",
    help="How often each case is timed; the table has medians.",
)
@click.option(
    "--caches",
    default="bf16,fp8,int2",
    show_default=True,
    metavar="CACHE,...",
    help="Caches to measure, in this order.",
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
@options.dummy_weights_option(
    "Measure a model of this shape with random weights: a name of the zoo, or a folder with a"
    " config.json."
)
@options.served_model_options
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="BACKEND,...",
    help=(
        "Attention backends to measure BF16 and FP8 with; INT2 is compared with the best."
        " [default: flashinfer; torch_native on a CPU]"
    ),
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
@options.start_timeout_option(
    "How long the start of an engine may take, each repeat of a case, and the job."
)
@options.offline_option
@options.hubs_option
@options.device_option
@options.quiet_option
@options.json_option
def serve_command(
    artifact: str | None,
    engine_flags: tuple[str, ...],
    batch: str | None,
    context: str | None,
    cases: str | None,
    caches: str,
    baselines: tuple[str, ...],
    job: str | None,
    turns: int,
    csv: Path | None,
    plot: Path | None,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Start stock SGLang with a BF16 cache, with an FP8 cache, and then with the plugin and an INT2
    cache, and send all the same prompts.

    For every batch and context: the time until the last request of the batch has its first token,
    milliseconds per token (median over the last three quarters of the new tokens, while all
    requests run), tokens per second of the whole batch, and how many tokens the cache holds. Before
    a case is timed, a batch of as many requests runs, one of them with a prompt of that length, so
    that compiling is not counted. Then it is timed --repeats times, each time with other prompts.
    The table has the medians, and behind ± how far the farthest repeat was from them. Prompts are
    random tokens; the prefix cache is off, unless --turns asks for conversations.

    With several backends in --baseline, BF16 and FP8 are measured with each of them. The table says
    which is best in each case, by the time per token, and INT2 is compared with that one.

    The artifact is found and verified as for oscar-zoo serve. With --dummy-weights nothing needs to
    be there: weights are random, and without an artifact the rotation is a Hadamard matrix. The
    speed depends on neither.

    Everything after -- goes to all engines, except flags that would make them differ. A side that
    fails is reported and the others still run; the exit code is 1 then. Where no GPU is found, a
    model with more than 2 GB of weights is refused unless --device cpu says that it is meant.

    \b
    Examples:
      oscar-zoo bench serve Qwen3-8B --csv figures.csv --plot figures.png
      oscar-zoo bench serve --dummy-weights Qwen3-8B --batch 1 --context 100000
      oscar-zoo bench serve --dummy-weights Qwen3-8B --cases 1x100000,16x30000,64x8000
      oscar-zoo bench serve --dummy-weights Qwen3-8B --caches bf16,int2 --repeats 5
      oscar-zoo bench serve --dummy-weights Qwen3-8B --baseline flashinfer,fa3,triton
      oscar-zoo bench serve --dummy-weights Qwen3-8B --job 64x30000x512
      oscar-zoo bench serve --dummy-weights Qwen3-8B --job 64x16000x256 --turns 2
      oscar-zoo bench serve --dummy-weights ./my-model -- --tp=2 --mem-fraction-static=0.8
    """
    if choices["offline"]:
        options.go_offline()  # before the libraries below are imported
    from oscar_zoo.app import bench
    from oscar_zoo.bench import records
    from oscar_zoo.cli.pasting import typed_again
    from oscar_zoo.cli.render.bench import print_failures, print_report
    from oscar_zoo.cli.render.progress import TerminalObserver

    artifact, engine_flags = parsing.apart(artifact, engine_flags)
    bulk = parsing.bulk_of(job, turns)
    request = bench.BenchRequest(
        artifact,
        cases=parsing.cases_of(batch, context, cases),
        bulk=bulk,
        caches=parsing.caches_of(caches),
        baselines=tuple(name for text in baselines for name in parsing.listed(text)),
        extra=engine_flags,
        again=typed_again("--model", "FOLDER"),
        **choices,
    )
    bench.check(request)
    _check_files(csv, plot)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = bench.compare(request, observer)
    terminal.emit_json(records.as_json(report)) if as_json else print_report(report)
    saved = save_after_result(_files(report, csv, plot), quiet=quiet or as_json)
    print_failures(report)
    if report.stopped is not None:
        return 128 + signal.Signals[report.stopped]
    return 1 if report.errors else saved


def _check_files(csv: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written in the end; raises `UsageError` and its kin."""
    from oscar_zoo.artifact.output_files import check_file

    if plot is not None:
        if plot.suffix.lower() != ".png":
            raise UsageError(f"--plot {plot} is not a PNG file.", hint="end its name in .png")
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingDependency.for_extra("matplotlib", "compute")
    check_file(csv)
    check_file(plot)


def _files(report: Report, csv: Path | None, plot: Path | None) -> dict[Path, Callable[[], bytes]]:
    """What to write where."""
    files: dict[Path, Callable[[], bytes]] = {}
    if csv is not None:
        from oscar_zoo.bench.records import as_csv

        files[csv] = lambda: as_csv(report).encode()
    if plot is not None:
        from oscar_zoo.bench.chart import render_png

        files[plot] = lambda: render_png(report)
    return files
