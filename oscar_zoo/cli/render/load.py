"""The result of a load test as a table, and a line for everything that did not hold."""

from __future__ import annotations

from oscar_zoo.bench.load_memory import Usage
from oscar_zoo.bench.load_run import Drain, LoadReport
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.bench import STOPPED


def print_load(report: LoadReport) -> None:
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


def print_stop(report: LoadReport) -> None:
    """A line on stderr when a signal ended the run early."""
    if report.stopped is not None:
        what = f"stopped by {STOPPED[report.stopped]} after {report.seconds:,.0f} s of load"
        kept = f"{what}; the result is what was measured until then"
        terminal.print_error("interrupted", kept, None, as_json=False)


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
