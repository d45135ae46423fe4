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

TEXT_TASKS = ("perplexity", "recall", "sessions")
FORMATS = (".html", ".png", ".svg")
_SERVERS = ("sglang", "vllm")
_TEXT_ONLY = ("windows", "length", "answers", "stream_weights", "engine")
"""Options of perplexity and recall, which benchmarks do not have."""


def run(params: EvalParams, observer: Observer) -> Any:
    """Measure in the way that the options ask for; options of another way are refused."""
    from oscar_zoo.artifact.durable import check_file
    from oscar_zoo.evaluate import in_process

    asks_benchmarks, values = _asks_benchmarks(params), in_process.values_of(params)
    of_servers = [name for name in given(params, Servers) if name != "engine"]
    if params.against is not None:
        _check_against(params)
    elif params.plots:
        raise UsageError("--plot needs --against.", hint="for example --against all")
    if asks_benchmarks or params.engine in _SERVERS:
        lists = [flag_of(params, name) for name in values if name != "clip"]
        lists += ["a list of --clip"] if len(params.clips) > 1 else []
        if lists:
            raise UsageError(
                f"{lists[0]} is for the model in this process, and a server is asked here.",
                hint="leave it out, or leave out --engine and benchmarks",
            )
    if asks_benchmarks:
        wrong = [name for name in _TEXT_ONLY if getattr(params, name) not in (None, *_SERVERS)]
        _refuse(
            params,
            [*wrong, *(name for name in of_servers if name not in ("url", "timeout"))],
            "is for perplexity and recall.",
            "oscar-zoo eval --help",
        )
        from oscar_zoo.evaluate.benchmarks import suite

        return suite.run_benchmarks(params, observer)
    _refuse(
        params, given(params, Benchmarks), "is for benchmarks.", "for example --task gpqa_diamond"
    )
    if params.engine in _SERVERS:
        from oscar_zoo.evaluate import servers

        check_file(params.csv)
        return servers.evaluate(params, observer)
    _refuse(params, of_servers, "needs --engine sglang or vllm.", "try: oscar-zoo eval --help")
    if in_process.SESSIONS in params.tasks:
        others = [name for name in ("data", "answers") if getattr(params, name) is not None]
        _refuse(params, others, "is for perplexity and recall.", "leave it out, or --task sessions")
    if params.engine_flags:
        raise UsageError(
            f"{params.engine_flags[0]} is for an engine.",
            hint="add --engine sglang, or leave it out",
        )
    for file in params.plots:
        check_plot(str(file), FORMATS)
        check_file(file)
    return in_process.evaluate(params, observer)


def _refuse(params: EvalParams, names: list[str], why: str, hint: str) -> None:
    """Refuse the first of the options `names`."""
    for name in names:
        raise UsageError(f"{flag_of(params, name)} {why}", hint=hint)


def _asks_benchmarks(params: EvalParams) -> bool:
    """Whether the tasks are benchmarks; refuses unknown ones, and both kinds together."""
    for name in params.tasks:
        if name not in TEXT_TASKS and not is_benchmark(name):
            raise UsageError(
                f"no such task: {name}.", hint=f"tasks: {', '.join((*TEXT_TASKS, *NAMES))}"
            )
    texts = [name for name in params.tasks if name in TEXT_TASKS]
    alone = {None: set[str](), "transformers": {"sessions", "recall"}}
    wrong = ["tasks"] if alone.get(params.engine, {"sessions"}) & {*texts} else []
    _refuse(params, wrong, "is measured with the simulated cache.", "leave out --engine")
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
    if params.engine or params.engine_flags:
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
        "ServerReport": evaluation.print_servers,
        "BenchmarkReport": evaluation.print_benchmarks,
        "SessionsReport": evaluation.print_sessions,
        "EvalReport": partial(evaluation.print_report, data=params.data or "manuals"),
    }
    views[type(outcome).__name__](outcome)


def after(outcome: Any, params: EvalParams, *, quiet: bool) -> int:
    """Write the files that were asked for; 1 when one could not be written."""
    from oscar_zoo.cli.pasting import save_after_result
    from oscar_zoo.cli.render import evaluation

    files: dict[Any, Any] = {}
    if params.csv is not None:
        files[params.csv] = lambda: evaluation.to_csv(outcome.to_json()["servers"]).encode()
    for file in params.plots:
        files[file] = partial(_drawn, outcome, file.suffix.lower().removeprefix("."))
    saved = save_after_result(files, quiet=quiet)
    if quiet:  # otherwise the observer has printed them
        evaluation.print_failures(getattr(outcome, "failures", ()))
    return saved


def _drawn(report: Any, kind: Any) -> bytes:
    from oscar_zoo.evaluate.charts import loss_chart

    return loss_chart(report, f"Loss against bits: {report.model.id}", kind)


command = build.command(
    "eval",
    EvalParams,
    run=f"{__name__}:run",
    view=f"{__name__}:show",
    then=f"{__name__}:after",
    cls=FlagsCommand,
)
