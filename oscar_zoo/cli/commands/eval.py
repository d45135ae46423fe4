"""`oscar-zoo eval`: how good an INT2 cache is, measured in process, or in the server that runs
it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from oscar_zoo.cli import build
from oscar_zoo.cli.engine_flags import FlagsCommand
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.benchmarks.tasks import NAMES, is_benchmark
from oscar_zoo.evaluate.params import Benchmarks, EvalParams, Servers, flag_of, given

if TYPE_CHECKING:
    from oscar_zoo.observer import Observer

TEXT_TASKS = ("perplexity", "recall")
FORMATS = (".html", ".png", ".svg")
_TEXT_ONLY = ("windows", "length", "answers", "stream_weights")
"""Options of perplexity and recall, which benchmarks do not have."""


def run(params: EvalParams, observer: Observer) -> Any:
    """Measure in the way that the options ask for; options of another way are refused."""
    from oscar_zoo.app.evaluate import values_of
    from oscar_zoo.artifact.output_files import check_file

    asks_benchmarks = _asks_benchmarks(params)
    values = values_of(params)
    in_server = params.engine == "sglang" or asks_benchmarks
    servers = [name for name in given(params, Servers) if name != "engine"]
    if params.against is not None:
        _check_against(params)
    elif params.plots:
        raise UsageError("--plot needs --against.", hint="for example --against all")
    if in_server:
        lists = {"sink": values.sink, "recent": values.recent, "group_size": values.group_size}
        refused = [flag_of(params, name) for name, found in lists.items() if found]
        refused += ["a list of --clip"] if len(values.clip) > 1 else []
        if refused:
            raise UsageError(
                f"{refused[0]} is for the model in this process, and a server is asked here.",
                hint="leave it out, or leave out --engine and benchmarks",
            )
    if asks_benchmarks:
        wrong = [name for name in _TEXT_ONLY if getattr(params, name) is not None]
        for name in (*wrong, *(one for one in servers if one not in ("url", "timeout"))):
            raise UsageError(
                f"{flag_of(params, name)} is for perplexity and recall.",
                hint="oscar-zoo eval --help",
            )
        from oscar_zoo.app.benchmark import run_benchmarks

        return run_benchmarks(params, observer)
    for name in given(params, Benchmarks):
        raise UsageError(
            f"{flag_of(params, name)} is for benchmarks.", hint="for example --task gpqa_diamond"
        )
    if in_server:
        from oscar_zoo.app import evaluate_server

        check_file(params.csv)
        return evaluate_server.evaluate(params, observer)
    for name in servers:
        raise UsageError(
            f"{flag_of(params, name)} needs --engine sglang.", hint="try: oscar-zoo eval --help"
        )
    if params.engine_flags:
        raise UsageError(
            f"{params.engine_flags[0]} is for an engine.",
            hint="add --engine sglang, or leave it out",
        )
    from oscar_zoo.app import evaluate

    for file in params.plots:
        check_plot(str(file), FORMATS)
        check_file(file)
    if params.against is not None:
        return evaluate.compare(params, observer)
    return evaluate.evaluate(params, observer)


def _asks_benchmarks(params: EvalParams) -> bool:
    """Whether the tasks are benchmarks; refuses unknown ones, and both kinds together."""
    for name in params.tasks:
        if name not in TEXT_TASKS and not is_benchmark(name):
            raise UsageError(
                f"no such task: {name}.", hint=f"tasks: {', '.join((*TEXT_TASKS, *NAMES))}"
            )
    texts = [name for name in params.tasks if name in TEXT_TASKS]
    if texts and len(texts) < len(params.tasks):
        raise UsageError(
            f"{texts[0]} is not asked together with benchmarks.", hint="give two commands"
        )
    return bool(params.tasks) and not texts


def _check_against(params: EvalParams) -> None:
    from oscar_zoo.evaluate.against_table import choices

    if params.tasks:
        raise UsageError(
            "--against measures divergence, perplexity and recall together.",
            hint="leave out --task",
        )
    if params.engine != "transformers" or params.engine_flags:
        raise UsageError(
            "--against simulates caches in this process.", hint="leave out --engine and its flags"
        )
    choices(str(params.against).split(","))


def check_plot(file: str, formats: tuple[str, ...]) -> None:
    """Refuse a chart of another format."""
    if not file.lower().endswith(formats):
        names = f"{', '.join(formats[:-1])} or {'a ' if len(formats) == 2 else ''}{formats[-1]}"
        raise UsageError(f"{file} is neither a page nor a picture.", hint=f"name an {names} file")


def show(outcome: Any, params: EvalParams, *, quiet: bool) -> None:
    """What was measured, as text."""
    from oscar_zoo.cli.render import evaluation

    views: dict[str, Any] = {
        "AgainstReport": evaluation.print_against,
        "ServerEvaluation": evaluation.print_servers,
        "BenchmarkResult": evaluation.print_benchmarks,
        "EvalReport": partial(evaluation.print_report, data=params.data or "manuals"),
    }
    views[type(outcome).__name__](outcome)


def after(outcome: Any, params: EvalParams, *, quiet: bool) -> int:
    """Write the files that were asked for; 1 when one could not be written."""
    from oscar_zoo.cli.pasting import save_after_result
    from oscar_zoo.cli.render import evaluation

    files: dict[Any, Any] = {}
    if params.csv is not None:
        files[params.csv] = lambda: evaluation.to_csv(outcome.rows).encode()
    for file in params.plots:
        files[file] = partial(_drawn, outcome, file.suffix.lower().removeprefix("."))
    saved = save_after_result(files, quiet=quiet)
    if quiet and params.engine == "sglang":  # otherwise the observer has printed them
        evaluation.print_failures(outcome.failures)
    return saved


def _drawn(report: Any, kind: Any) -> bytes:
    from oscar_zoo.evaluate.charts import loss_chart

    return loss_chart(report, f"Loss against bits: {report.facts['model']['id']}", kind)


command = build.command(
    "eval",
    EvalParams,
    run=f"{__name__}:run",
    view=f"{__name__}:show",
    then=f"{__name__}:after",
    cls=FlagsCommand,
)
