"""The comparison of caches as a table: a row per case and side, then notes and capacities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from oscar_zoo.app.bench import side_log
from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang.offline_process import Case
from oscar_zoo.evaluate.bench.load import Drain, LoadReport, Usage
from oscar_zoo.evaluate.bench.report import INT2, Report
from oscar_zoo.evaluate.bench.run import CaseResult
from oscar_zoo.evaluate.bench.sides import LABELS, Cache, Side

STOPPED = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM"}
"""Signals that end a comparison, as people call them."""


def print_serve(report: Report, params: object = None, *, quiet: bool = False) -> None:
    """Everything of `report`, on stdout."""
    console = terminal.out()
    weights = "random weights" if report.random_weights else "its own weights"
    console.print(f"{terminal.clean(report.model)}, {weights}, {terminal.clean(report.device)}")
    columns = ["BATCH", "CONTEXT", "CACHE", "FIRST TOKEN", "PER TOKEN", "TOKENS/S"]
    columns += [f"vs {LABELS[cache]}" for cache in report.compared]
    table = terminal.table(*columns, right=tuple(n for n in range(len(columns)) if n != 2))
    for case in report.cases:
        for side in report.sides:
            best = not side.alone and side == report.best(side.cache, case)
            label = f"{side.label} (best)" if best else side.label
            table.add_row(
                f"{case.batch:,}", f"{case.context:,}", label, *_cells(report, side, case)
            )
    console.print(table)
    for line in (*_notes(report), *_job(report), *_capacity(report)):
        console.print(line)
    if report.not_compared is not None:
        console.print(f"No ratio  {report.not_compared}")


def print_failures(report: Report) -> None:
    """A line on stderr for every side that failed, and one when a signal ended the comparison."""
    failed = dict(report.errors)
    if report.stopped is not None:
        side, last = list(report.sides.items())[-1]
        failed.pop(side, None)
        where = f" ({side.label}: {last.error})" if last.error else ""
        what = f"stopped by {STOPPED[report.stopped]}{where}; what was measured until then is kept"
        terminal.print_error("interrupted", what, None, as_json=False)
    for side, error in failed.items():
        log = f"log: {side_log(side)}"
        terminal.print_error("server", f"{side.label}: {error}.", log, as_json=False)


def _cells(report: Report, side: Side, case: Case) -> list[str]:
    result = report.result(side, case)
    if result is None or result.figures is None:
        return ["-"] * 3 + [""] * len(report.compared)
    found = result.figures
    per_token, rate = found.ms_per_token, found.tokens_per_second
    return [
        f"{found.ttft_s:,.3f} s{_spread(result, 'ttft_s')}",
        "too few" if per_token is None else f"{per_token:,.2f} ms{_spread(result, 'ms_per_token')}",
        "too few" if rate is None else f"{rate:,.0f}",
        *(
            f"{speedup:.2f} x" if side == INT2 and (speedup := report.speedup(case, cache)) else ""
            for cache in report.compared
        ),
    ]


def _spread(result: CaseResult, name: str) -> str:
    """How far the farthest repeat was from the median, in percent of it."""
    values = [getattr(one, name) for one in result.repeats]
    middle = getattr(result.figures, name)
    if len(values) < 2 or not middle:
        return ""
    low, high = result.spread[name]
    percent = 100 * max(high - middle, middle - low) / middle
    return f" ±{percent:.1f} %" if percent < 9.95 else f" ±{percent:.0f} %"


def _notes(report: Report) -> list[str]:
    """Why the table has gaps; sides that ended early are reported by `print_failures`."""
    return [
        f"{side.label} {result.case}: {terminal.clean(note)}"
        for side, found in report.sides.items()
        for result in found.cases
        if (note := report.note(side, result.case)) is not None
    ]


def _job(report: Report) -> list[str]:
    """How long the job took on each side."""
    if report.bulk is None:
        return []
    parts = []
    for side, found in report.sides.items():
        seconds = report.job_seconds(side)
        refused = found.bulk.refused if found.bulk else None
        missing = terminal.clean(refused) if refused else "not measured"
        parts.append(f"{side.label} {missing if seconds is None else f'{seconds:,.1f} s'}")
    turns = range(report.bulk.turns if report.bulk.turns > 1 else 0)
    ratios = _times(report, report.job_speedup)
    first = f"Job       {report.bulk}: {' · '.join(parts)}{ratios}"
    return [first, *(_turn(report, number) for number in turns)]


def _turn(report: Report, number: int) -> str:
    """How long one turn took on each side, and the share that was in the prefix cache."""
    parts = [
        f"{side.label} {turn.seconds:,.1f} s, {100 * turn.reused:.0f}% reused"
        for side in report.sides
        if (turn := report.turn(side, number)) is not None
    ]
    ratios = _times(report, partial(report.turn_speedup, number))
    return f"  Turn {number + 1:<3} {' · '.join(parts) or 'not measured'}{ratios}"


def _times(report: Report, ratio: Callable[[Cache], float | None], digits: int = 2) -> str:
    """The ratios of INT2 to the stock caches, in brackets; nothing without any."""
    found = [
        f"{value:.{digits}f} times {LABELS[cache]}"
        for cache in report.compared
        if (value := ratio(cache))
    ]
    return f" (INT2 {', '.join(found)})" if found else ""


def _capacity(report: Report) -> list[str]:
    parts = [
        f"{LABELS[side.cache]} ({found.engine.get('attention_backend', 'no backend')})"
        f" {found.capacity:,} tokens"
        for side, found in report.sides.items()
        if found.capacity is not None
    ]
    ratios = _times(report, report.capacity_ratio, digits=1)
    note = (
        "; on a CPU it is what --max-total-tokens says, and numbers have 32 bits"
        if report.device == "CPU"
        else ""
    )
    return [f"Capacity  {' · '.join(parts)}{ratios}{note}"] if parts else []


def print_load(report: LoadReport, params: object = None, *, quiet: bool = False) -> None:
    """Everything of `report`, on stdout."""
    facts, drain = report.to_json(), report.drain
    table = terminal.table("", "")
    table.show_header = False
    firsts = facts["ttft_median_s"]
    table.add_row("requests", f"{facts['finished']:,} finished, {facts['aborted']:,} hung up")
    table.add_row("errors", f"{report.tally.errors.total():,}")
    table.add_row("tokens/s", f"{facts['tokens_per_second']:,.0f}")
    table.add_row(
        "first token", terminal.NOT_REPORTED if firsts is None else f"{firsts:,.3f} s (median)"
    )
    table.add_row("host memory", _memory(report.host))
    table.add_row("GPU memory", _memory(report.gpu))
    unknown = terminal.NOT_REPORTED if report.stopped is None else "not checked"
    after = unknown if report.free_after is None else f"{sum(report.free_after):,}"
    table.add_row("free tokens", f"{sum(report.free_before):,} before, {after} after")
    table.add_row("SIGTERM", unknown if drain is None else _ended(drain))
    console = terminal.out()
    console.print(table)
    for line in report.violations:
        console.print(f"{terminal.MARKS['failed']} {terminal.clean(line)}")


def print_stop(report: LoadReport, params: object = None, *, quiet: bool = False) -> int:
    """A line on stderr when a signal ended the run early."""
    if report.stopped is not None:
        what = f"stopped by {STOPPED[report.stopped]} after {report.seconds:,.0f} s of load"
        kept = f"{what}; the result is what was measured until then"
        terminal.print_error("interrupted", kept, None, as_json=False)
    return 0


def _ended(drain: Drain) -> str:
    return (
        f"{drain.finished} of {drain.running} running requests finished, {drain.status} after"
        f" {drain.seconds:.1f} s; a request that came later: {drain.late_request}"
    )


def _memory(used: Usage | None) -> str:
    if used is None:
        return terminal.NOT_REPORTED
    middle, end, most = (f"{size / 1e6:,.0f} MB" for size in (used.early, used.late, used.peak))
    return f"{middle} in the middle, {end} at the end, {most} at most"
