"""The comparison of caches as a table: a row per case and side, then notes and capacities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang.launch.starting import log_file
from oscar_zoo.engines.sglang.offline_process import Case
from oscar_zoo.evaluate.bench.load import LoadReport, Usage
from oscar_zoo.evaluate.bench.report import LABELS, Cache, CaseResult, Number, Report, Side

STOPPED = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM"}
"""Signals that end a comparison, as people call them."""


def print_serve(report: Report, params: object = None, *, quiet: bool = False) -> None:
    console = terminal.out()
    weights = "random weights" if report.weights == "random" else "its own weights"
    console.print(f"{terminal.clean(report.model)}, {weights}, {terminal.clean(report.device)}")
    columns = ["BATCH", "CONTEXT", "CACHE", "FIRST TOKEN", "PER TOKEN", "TOKENS/S"]
    columns += [f"vs {LABELS[cache]}" for cache in report.compared]
    table = terminal.table(*columns, right=tuple(n for n in range(len(columns)) if n != 2))
    for case in report.cases:
        for side in report.sides:
            best = not side.alone and side is report.best(side.cache, case)
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
    failed = [side for side in report.sides if side.error is not None]
    if report.stopped is not None:
        last = report.sides[-1]
        failed = [side for side in failed if side is not last]
        where = f" ({last.label}: {last.error})" if last.error else ""
        what = f"stopped by {STOPPED[report.stopped]}{where}; what was measured until then is kept"
        terminal.print_error("interrupted", what, None, as_json=False)
    for side in failed:
        log = f"log: {log_file(side.log)}"
        terminal.print_error("server", f"{side.label}: {side.error}.", log, as_json=False)


def _cells(report: Report, side: Side, case: Case) -> list[str]:
    found = side.of(case)
    if found is None or found.ttft_s is None:
        return ["-"] * 3 + [""] * len(report.compared)
    per_token, rate, ratios = found.ms_per_token, found.tokens_per_second, list[str]()
    for cache in report.compared:
        speedup = report.speedup(cache, case) if side.cache == "int2" else None
        ratios.append(f"{speedup:.2f} x" if speedup else "")
    return [
        f"{found.ttft_s:,.3f} s{_spread(found, 'ttft_s')}",
        "too few" if per_token is None else f"{per_token:,.2f} ms{_spread(found, 'ms_per_token')}",
        "too few" if rate is None else f"{rate:,.0f}",
        *ratios,
    ]


def _spread(result: CaseResult, name: Number) -> str:
    """How far the farthest repeat was from the median, in percent of it."""
    ends, middle = result.spread[name], getattr(result, name)
    if result.repeats < 2 or not middle or ends is None:
        return ""
    percent = 100 * max(ends[1] - middle, middle - ends[0]) / middle
    return f" ±{percent:.1f} %" if percent < 9.95 else f" ±{percent:.0f} %"


def _notes(report: Report) -> list[str]:
    """Why the table has gaps; sides that ended early are reported by `print_failures`."""
    return [
        f"{side.label} {result.case}: {terminal.clean(result.note)}"
        for side in report.sides
        for result in side.cases
        if result.note is not None
    ]


def _job(report: Report) -> list[str]:
    """How long the job took on each side, and each of several turns, with the share of its prompts
    that was in the prefix cache."""
    if report.bulk is None:
        return []
    parts = []
    for side in report.sides:
        refused = side.job.refused if side.job else None
        missing = terminal.clean(refused) if refused else "not measured"
        seconds = side.time()
        parts.append(f"{side.label} {missing if seconds is None else f'{seconds:,.1f} s'}")
    ratios = _times(report, report.speedup)
    lines = [f"Job       {report.bulk}: {' · '.join(parts)}{ratios}"]
    for number in range(report.bulk.turns if report.bulk.turns > 1 else 0):
        parts = [
            f"{side.label} {turn.seconds:,.1f} s, {100 * turn.reused:.0f}% reused"
            for side in report.sides
            if (turn := side.turn(number)) is not None
        ]
        ratios = _times(report, partial(report.speedup, turn=number))
        lines.append(f"  Turn {number + 1:<3} {' · '.join(parts) or 'not measured'}{ratios}")
    return lines


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
        f"{LABELS[side.cache]} ({side.engine.get('attention_backend', 'no backend')})"
        f" {side.capacity:,} tokens"
        for side in report.sides
        if side.capacity is not None
    ]
    ratios = _times(report, report.capacity_ratio, digits=1)
    cpu = "; on a CPU it is what --max-total-tokens says, and numbers have 32 bits"
    note = cpu if report.device == "CPU" else ""
    return [f"Capacity  {' · '.join(parts)}{ratios}{note}"] if parts else []


def print_load(report: LoadReport, params: object = None, *, quiet: bool = False) -> None:
    table = terminal.table("", "")
    table.show_header = False
    firsts, free, drain = report.ttft_median_s, report.free_tokens, report.drain
    unknown = terminal.NOT_REPORTED if report.stopped is None else "not checked"
    after = unknown if free.after is None else f"{sum(free.after):,}"
    rows = {
        "requests": f"{report.finished:,} finished, {report.aborted:,} hung up",
        "errors": f"{sum(report.errors.values()):,}",
        "tokens/s": f"{report.tokens_per_second:,.0f}",
        "first token": terminal.NOT_REPORTED if firsts is None else f"{firsts:,.3f} s (median)",
        "host memory": _memory(report.host_memory),
        "GPU memory": _memory(report.gpu_memory),
        "free tokens": f"{sum(free.before):,} before, {after} after",
        "SIGTERM": unknown
        if drain is None
        else f"{drain.finished} of {drain.running} running requests finished, {drain.status} after"
        f" {drain.seconds:.1f} s; a request that came later: {drain.late_request}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
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


def _memory(used: Usage | None) -> str:
    if used is None:
        return terminal.NOT_REPORTED
    middle, end, most = (f"{size / 1e6:,.0f} MB" for size in (used.early, used.late, used.peak))
    return f"{middle} in the middle, {end} at the end, {most} at most"
