"""Scores of benchmarks: a line per task and cache, what a difference means, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.specs import Score
from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.app.benchmark import BenchmarkResult
    from oscar_zoo.app.benchmark_record import TaskResult

SCHEMA = "oscar-zoo.eval-benchmark/1"
_CACHES = {"int2": "INT2", "fp8": "FP8"}


def print_result(found: BenchmarkResult) -> None:
    """The table, a sentence per comparison, and where the scores are."""
    console = terminal.out()
    table = terminal.table(
        "TASK",
        "N",
        "BF16",
        "CACHE",
        "SCORE",
        "DIFFERENCE",
        "95 % INTERVAL",
        "CUT",
        right=(1, 2, 4, 5, 6, 7),
    )
    for score in _scores(found):
        table.add_row(*_row(score))
    console.print(terminal.clean(found.model))
    console.print(table)
    for score in _scores(found):
        if score.paired is not None:
            terminal.prose(_sentence(score))
    if found.file is not None:
        terminal.prose(f"Scores: {found.file}")
    for task in found.tasks:
        terminal.prose(f"Answers: {task.answers}")


def to_json(found: BenchmarkResult) -> dict[str, Any]:
    """The JSON of `eval` with benchmarks."""
    return {
        "schema": SCHEMA,
        "model": found.model,
        "artifact": {"name": found.artifact.label, "digest": found.artifact.digest},
        "file": None if found.file is None else str(found.file),
        "tasks": [_task(task) for task in found.tasks],
    }


def _task(task: TaskResult) -> dict[str, Any]:
    return {
        "task": task.name,
        "answers": str(task.answers),
        "scores": [score.model_dump(mode="json") for score in task.scores],
    }


def _scores(found: BenchmarkResult) -> Iterator[Score]:
    return (score for task in found.tasks for score in task.scores)


def _row(score: Score) -> list[str]:
    paired, base = score.paired, score.baseline
    return [
        terminal.clean(score.task),
        f"{score.n} x {score.repeats}",
        "-" if base is None else _value(base),
        _CACHES[score.kv_dtype],
        _value(score),
        "-" if paired is None else f"{paired.difference:+.1f}",
        "-" if paired is None else f"{paired.lower95:+.1f} .. {paired.upper95:+.1f}",
        f"{100 * (score.exhausted_rate or 0):.0f} %",
    ]


def _value(score: Score) -> str:
    return f"{score.value:.1f} ± {score.stderr:.1f}"


def _sentence(score: Score) -> str:
    paired = score.paired
    assert paired is not None
    chance = "" if paired.p_value is None else f" (McNemar p = {paired.p_value:.2g})"
    return (
        f"{score.task}: {_CACHES[score.kv_dtype]} is at most {paired.no_worse_than:.1f} points"
        f" worse than BF16, with 95 % confidence{chance}."
    )
