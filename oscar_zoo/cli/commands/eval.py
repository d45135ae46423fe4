"""`oscar-zoo eval`: how good an INT2 cache is, measured in process, or in the server that runs
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.app.evaluate import EvaluateRequest, evaluate
from oscar_zoo.cli import against_options, benchmark_options, completing, eval_options, options
from oscar_zoo.cli.engine_flags import FlagsCommand
from oscar_zoo.cli.render import terminal
from oscar_zoo.evaluate.benchmarks.tasks import NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from oscar_zoo.app.benchmark_request import BenchmarkRequest
    from oscar_zoo.app.evaluate_against import AgainstRequest
    from oscar_zoo.cli.render.progress import TerminalObserver


@click.command("eval", cls=FlagsCommand)
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
    metavar="TASK",
    multiple=True,
    callback=benchmark_options.check_task,
    shell_complete=completing.tasks,
    help=(
        f"perplexity, recall, or a benchmark: {', '.join(NAMES)}; can be repeated. [default:"
        " perplexity and recall]"
    ),
)
@click.option(
    "--data",
    metavar="FILE|NAME",
    help=(
        "Text file, or a text known by name; of a benchmark, its rows. [default:"
        f" {EvaluateRequest.data}; the benchmark's own data set]"
    ),
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
@eval_options.recipe_options
@against_options.against_options
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
@eval_options.server_eval_options
@benchmark_options.benchmark_options
@options.offline_option
@options.hubs_option
@options.devices_option
@options.stream_option
@options.quiet_option
@options.json_option
def command(
    artifact: str,
    engine_flags: tuple[str, ...],
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

    One value of --sink, --recent, --clip or --group-size takes the place of the recipe's for every
    cache. With several, BF16 and the artifact under every combination are measured, and no scores
    are kept.

    With --against, caches of other methods stand beside the artifact: their bits, how far they move
    what the model says next (KL), perplexity, digits and whole answers recalled. A name alone means
    all its bits. Names: fp8, int4, k4v2, int2, hadamard, hadamard-clip, kivi, kivi-windows,
    kivi-token, turboquant, turboquant-prod, lmdeploy, oscar, all. No scores are kept.

    With --engine sglang the artifact is served by stock SGLang, and its perplexity is computed from
    the server's own log-probabilities, cold and behind a prefix-cache hit; recall is asked for in
    conversations of three turns that reuse the cache, and once more without reuse. The reference in
    this process has the same chunks. The exit code is 1 when they differ. Lists such as --chunk
    512,8192 start a server for every pair of values; --sweep is the whole list.

    A benchmark as --task is asked of a server with the INT2 cache, then of one with a BF16 cache,
    under the same settings. Answers are kept as they come, so the same command goes on where it
    stopped. The benchmark sample needs no network.

    \b
    Examples:
      oscar-zoo eval ./my-rotation --model ./my-model --task perplexity --data text.txt
      oscar-zoo eval Qwen3-8B --json
      oscar-zoo eval Qwen3-8B --sink 0,64 --recent 128,256,512
      oscar-zoo eval Qwen3-8B --clip 0.96,0.92 --clip 0.9,0.9 --group-size 32,64
      oscar-zoo eval Qwen3-8B --against fp8,kivi,turboquant:2.5 --plot loss.svg
      oscar-zoo eval Qwen3-8B --engine sglang --chunk 512,8192 --csv servers.csv
      oscar-zoo eval Qwen3-8B --engine sglang --url http://127.0.0.1:30000
      oscar-zoo eval Qwen3-8B --task gpqa_diamond --task aime25 --seeds 5
      oscar-zoo eval Qwen3-8B --task math500 --data math500.jsonl --output scores.json
    """
    from oscar_zoo.cli.render.evaluation import print_report
    from oscar_zoo.cli.render.progress import TerminalObserver

    if offline:
        options.go_offline()  # before the libraries below are imported
    server = {name: choices.pop(name) for name in eval_options.SERVER_OPTIONS}
    benchmark = {name: choices.pop(name) for name in benchmark_options.BENCHMARK_OPTIONS}
    given = {name: value for name, value in choices.items() if value not in (None, ())}
    given |= {"artifact": artifact, "values": eval_options.take_values(given)}
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        against = against_options.against_request(given, engine, engine_flags)
        if against is not None:
            eval_options.refuse_server_options(server, engine_flags)
            benchmark_options.refuse_benchmark_options(benchmark)
            return _eval_against(against, given.get("plots", ()), observer, quiet, as_json)
        if any(task not in benchmark_options.TEXT_TASKS for task in given.get("tasks", ())):
            asked = benchmark_options.benchmark_request(given, server, benchmark, engine_flags)
            return _eval_benchmarks(asked, observer, as_json)
        benchmark_options.refuse_benchmark_options(benchmark)
        if engine == "sglang":
            return _eval_servers(given, server, engine_flags, observer, quiet, as_json)
        eval_options.refuse_server_options(server, engine_flags)
        request = EvaluateRequest(**given)
        report = evaluate(request, observer)
    if as_json:
        terminal.emit_json(report.to_json())
    else:
        print_report(report, request.data)
    return 0


def _eval_against(
    request: AgainstRequest,
    plots: tuple[Path, ...],
    observer: TerminalObserver,
    quiet: bool,
    as_json: bool,
) -> int:
    """`eval --against`; 1 when a chart could not be written."""
    from oscar_zoo.app.evaluate_against import evaluate
    from oscar_zoo.cli.render import against

    against_options.check_plots(plots)
    report = evaluate(request, observer)
    observer.close()
    if as_json:
        terminal.emit_json(report.to_json())
    else:
        against.print_report(report)
    title = f"Loss against bits: {report.facts['model']['id']}"
    return against.save_plots(report, title, plots, quiet=quiet or as_json)


def _eval_benchmarks(request: BenchmarkRequest, observer: TerminalObserver, as_json: bool) -> int:
    """`eval --task BENCHMARK`."""
    from oscar_zoo.app.benchmark import run_benchmarks
    from oscar_zoo.cli.render import benchmark

    found = run_benchmarks(request, observer)
    observer.close()
    if as_json:
        terminal.emit_json(benchmark.to_json(found))
    else:
        benchmark.print_result(found)
    return 0


def _eval_servers(
    given: dict[str, Any],
    server: dict[str, Any],
    flags: tuple[str, ...],
    observer: TerminalObserver,
    quiet: bool,
    as_json: bool,
) -> int:
    """`eval --engine sglang`; 1 when a server failed or differs from the reference."""
    from oscar_zoo.app import evaluate_server
    from oscar_zoo.artifact.output_files import check_file
    from oscar_zoo.cli.render import server_evaluation
    from oscar_zoo.cli.saving import save_after_result

    request = eval_options.server_request(given, server, flags)
    csv = server["csv"]
    check_file(csv)
    found = evaluate_server.evaluate(request, observer)
    observer.close()
    if as_json:
        terminal.emit_json(server_evaluation.to_json(found))
    else:
        server_evaluation.print_rows(found.model, found.rows)
    files = {} if csv is None else {csv: lambda: server_evaluation.to_csv(found.rows).encode()}
    saved = save_after_result(files, quiet=quiet or as_json)
    if quiet or as_json:  # otherwise the observer has printed them
        server_evaluation.print_failures(found.failures)
    return saved if found.passed else 1
