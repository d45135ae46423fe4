"""The comparison of two caches as a table: a row per case and cache, then notes and capacities."""

from __future__ import annotations

from oscar_zoo.app.bench import side_log
from oscar_zoo.bench.report import LABELS, Report
from oscar_zoo.bench.sides import Cache
from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang.offline_job import Case

STOPPED = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM"}
"""Signals that end a comparison, as people call them."""


def print_report(report: Report) -> None:
    """Everything of `report`, on stdout."""
    console = terminal.out()
    weights = "random weights" if report.random_weights else "its own weights"
    console.print(f"{terminal.clean(report.model)}, {weights}, {terminal.clean(report.device)}")
    columns = ["BATCH", "CONTEXT", "CACHE", "FIRST TOKEN", "PER TOKEN", "TOKENS/S", "vs BF16"]
    if report.not_compared is not None:
        columns.remove("vs BF16")
    table = terminal.table(*columns, right=tuple(n for n in range(len(columns)) if n != 2))
    for case in report.cases:
        for cache in report.sides:
            named = [f"{case.batch:,}", f"{case.context:,}", LABELS[cache]]
            table.add_row(*[*named, *_cells(report, cache, case)][: len(columns)])
    console.print(table)
    for line in (*_notes(report), *_job(report), *_capacity(report)):
        console.print(line)
    if report.not_compared is not None:
        console.print(f"No ratio  {report.not_compared}")


def print_failures(report: Report) -> None:
    """A line on stderr for every side that failed, and one when a signal ended the comparison."""
    failed = dict(report.errors)
    if report.stopped is not None:
        cache, last = list(report.sides.items())[-1]
        failed.pop(cache, None)
        where = f" ({LABELS[cache]}: {last.error})" if last.error else ""
        what = f"stopped by {STOPPED[report.stopped]}{where}; what was measured until then is kept"
        terminal.print_error("interrupted", what, None, as_json=False)
    for cache, error in failed.items():
        log = f"log: {side_log(cache)}"
        terminal.print_error("server", f"{LABELS[cache]}: {error}.", log, as_json=False)


def _cells(report: Report, cache: Cache, case: Case) -> list[str]:
    result = report.sides[cache].of(case)
    if result is None or result.figures is None:
        return ["-", "-", "-"]
    found, speedup = result.figures, report.speedup(case) if cache == "int2" else None
    return [
        f"{found.ttft_s:,.3f} s",
        "too few" if found.ms_per_token is None else f"{found.ms_per_token:,.2f} ms",
        "too few" if found.tokens_per_second is None else f"{found.tokens_per_second:,.0f}",
        "" if speedup is None else f"{speedup:.2f} x",
    ]


def _notes(report: Report) -> list[str]:
    """Why the table has gaps; sides that ended early are reported by `print_failures`."""
    return [
        f"{LABELS[cache]} {result.case}: {terminal.clean(result.refused)}"
        for cache, side in report.sides.items()
        for result in side.cases
        if result.refused is not None
    ]


def _job(report: Report) -> list[str]:
    """How long the job took on each side."""
    if report.bulk is None:
        return []
    parts = []
    for cache, side in report.sides.items():
        seconds = report.job_seconds(cache)
        missing = (
            terminal.clean(side.bulk.refused) if side.bulk and side.bulk.refused else "not measured"
        )
        parts.append(
            f"{LABELS[cache]} {missing}" if seconds is None else f"{LABELS[cache]} {seconds:,.1f} s"
        )
    turns = (
        [_turn(report, number) for number in range(report.bulk.turns)]
        if report.bulk.turns > 1
        else []
    )
    return [f"Job       {report.bulk}: {' · '.join(parts)}{_times(report.job_speedup)}", *turns]


def _turn(report: Report, number: int) -> str:
    """How long one turn took on each side, and the share that was in the prefix cache."""
    parts = [
        f"{LABELS[cache]} {turn.seconds:,.1f} s, {100 * turn.reused:.0f}% reused"
        for cache in report.sides
        if (turn := report.turn(cache, number)) is not None
    ]
    return (
        f"  Turn {number + 1:<3}"
        f" {' · '.join(parts) or 'not measured'}{_times(report.turn_speedup(number))}"
    )


def _times(ratio: float | None) -> str:
    return f" ({ratio:.2f} times)" if ratio else ""


def _capacity(report: Report) -> list[str]:
    parts = [
        f"{LABELS[cache]} ({side.engine.get('attention_backend', 'no backend')}) {side.capacity:,}"
        " tokens"
        for cache, side in report.sides.items()
        if side.capacity is not None
    ]
    ratio = f" ({report.capacity_ratio:.1f} times)" if report.capacity_ratio else ""
    note = (
        "; on a CPU it is what --max-total-tokens says, and numbers have 32 bits"
        if report.device == "CPU"
        else ""
    )
    return [f"Capacity  {' · '.join(parts)}{ratio}{note}"] if parts else []
