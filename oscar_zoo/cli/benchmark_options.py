"""Options of `eval` alone: those for benchmarks, which servers answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oscar_zoo.cli.eval_options import SERVER_OPTIONS, without_values, written
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.benchmarks.tasks import NAMES, is_benchmark

if TYPE_CHECKING:
    from oscar_zoo.app.benchmark_request import BenchmarkRequest

F = TypeVar("F", bound=Callable[..., Any])

BENCHMARK_OPTIONS: Mapping[str, Any] = {
    "base_url": None,
    "fp8": False,
    "seeds": None,
    "limit": None,
    "concurrency": 16,
    "max_new_tokens": None,
    "temperature": None,
    "top_p": None,
    "thinking": None,
    "run_code": False,
    "fresh": False,
    "output": None,
}
"""Options that only benchmarks have, with their defaults."""
_WRITTEN = {"run_code": "--run-model-code"}
_SERVER_TOO = ("url", "timeout")
"""Of `SERVER_OPTIONS`, those that benchmarks have too."""
_TEXT_ONLY = ("windows", "length", "answers", "stream_weights")
"""Options of perplexity and recall."""
TEXT_TASKS = ("perplexity", "recall")


def check_task(
    context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Callback of `--task`."""
    for name in names:
        if name not in TEXT_TASKS and not is_benchmark(name):
            raise UsageError(
                f"no such task: {name}.", hint=f"tasks: {', '.join((*TEXT_TASKS, *NAMES))}"
            )
    texts = [name for name in names if name in TEXT_TASKS]
    if texts and len(texts) < len(names):
        raise UsageError(
            f"{texts[0]} is not asked together with benchmarks.", hint="give two commands"
        )
    return names


def benchmark_options(function: F) -> F:
    """What is asked, how answers are generated, and what is kept."""
    given = (
        click.option("--base-url", metavar="URL", help="BF16 server beside the one of --url."),
        click.option("--fp8", is_flag=True, help="Measure an FP8 cache too."),
        click.option(
            "--seeds",
            type=click.IntRange(1, 100),
            metavar="N",
            help="Ask everything N times. [default: 3; 1 where nothing is drawn at random]",
        ),
        click.option(
            "--limit", type=click.IntRange(1), metavar="N", help="Only the first N questions."
        ),
        click.option(
            "--concurrency",
            type=click.IntRange(1, 1024),
            default=BENCHMARK_OPTIONS["concurrency"],
            metavar="N",
            help="Questions at a time. [default: 16]",
        ),
        click.option(
            "--max-new-tokens",
            type=click.IntRange(1),
            metavar="N",
            help="Tokens of an answer. [default: as the task says, within the model's context]",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(0),
            metavar="X",
            help="Of sampling; 0 is greedy. [default: as the model's generation_config.json says]",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1, min_open=True),
            metavar="X",
            help="Of sampling. [default: as the model's generation_config.json says]",
        ),
        click.option(
            "--thinking/--no-thinking",
            default=None,
            help="Tell the chat template. [default: as the template does]",
        ),
        click.option(
            "--run-model-code",
            "run_code",
            is_flag=True,
            help="Allow tasks that run programs of the model on this machine (humaneval).",
        ),
        click.option("--fresh", is_flag=True, help="Drop the answers of an earlier run."),
        click.option(
            "--output",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Where to write the scores. [default: with the other scores of the artifact]",
        ),
    )
    for option in reversed(given):
        function = option(function)
    return function


def refuse_benchmark_options(given: Mapping[str, Any]) -> None:
    """Raise `UsageError` when an option was given that needs a benchmark."""
    for name, default in BENCHMARK_OPTIONS.items():
        if given[name] != default:
            raise UsageError(
                f"{_written(name)} is for benchmarks.", hint="for example --task gpqa_diamond"
            )


def benchmark_request(
    given: Mapping[str, Any],
    server: Mapping[str, Any],
    benchmark: Mapping[str, Any],
    flags: tuple[str, ...],
) -> BenchmarkRequest:
    """The request of `eval --task BENCHMARK`."""
    from oscar_zoo.app.benchmark_request import BenchmarkRequest
    from oscar_zoo.cli.pasting import typed_again

    changed = [n for n in SERVER_OPTIONS if n not in _SERVER_TOO and server[n] != SERVER_OPTIONS[n]]
    for name in (*(name for name in _TEXT_ONLY if name in given), *changed):
        raise UsageError(
            f"{_written(name)} is for perplexity and recall.", hint="oscar-zoo eval --help"
        )
    values = without_values(given)
    if "data" in values:
        values["data"] = Path(values["data"]).expanduser()
    return BenchmarkRequest(
        **values,
        **benchmark,
        url=server["url"],
        timeout=server["timeout"],
        extra=flags,
        again=typed_again("--model", "FOLDER"),
    )


def _written(name: str) -> str:
    return _WRITTEN.get(name, written(name))
