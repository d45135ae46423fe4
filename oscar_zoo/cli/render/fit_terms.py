"""The sums behind the row of INT2 in `fit-gpu`, in bytes, so that they can be checked by hand."""

from __future__ import annotations

from oscar_zoo.app.fit_report import FitReport
from oscar_zoo.cli.render import terminal
from oscar_zoo.models.other_layers import STATES_PER_REQUEST


def print_terms(report: FitReport) -> None:
    """The division of the memory of a GPU, and that of its cache."""
    each = "" if report.gpus == 1 else f" of each of {report.gpus} GPUs"
    terminal.prose(
        f"In bytes{each}: {report.memory:,} - {report.reserved:,} reserved -"
        f" {report.gpu_weights:,} weights = {report.room:,} for a cache"
    )
    found = report.of_kind("INT2")
    if found.pools.states:
        _print_states(report)
    elif found.pools.sliding is not None:
        _print_sliding(report)
    elif report.other_layers:
        _print_request(report)
    terminal.prose(
        "Sinks count twice: those of a running request, and those of a finished prompt that stays"
        " for the prefix cache"
    )


def _print_request(report: FitReport) -> None:
    found = report.of_kind("INT2")
    cache, context = found.cache, report.context
    terms = [f"{context:,} x {cache.token:,}"]
    terms += [f"2 x {cache.sinks // 2:,} sinks", f"{cache.ring:,} ring"]
    total = cache.request_bytes(context)
    terminal.prose(
        f"{cache.kind}, a request of {context:,} tokens: {' + '.join(terms)} = {total:,};"
        f" {report.room:,} / {total:,} = {found.requests:,} requests"
    )


def _print_states(report: FitReport) -> None:
    found = report.of_kind("INT2")
    cache, pools = found.cache, found.pools
    row, state = cache.sinks + cache.ring, cache.state // STATES_PER_REQUEST
    rows, states = pools.requests + 1, pools.states + 1
    left = report.room - rows * row - states * state
    terminal.prose(
        f"INT2: {report.room:,} - {rows:,} x {row:,} sinks and rings - {states:,} x {state:,}"
        f" states = {left:,}; {left:,} / {cache.token:,} = {pools.tokens:,} tokens"
    )
    terminal.prose(
        f"A request takes up to {STATES_PER_REQUEST} state slots, its own and those of the prefix"
        " cache; `serve` divides the rest between states and tokens, and"
        " -- --max-mamba-cache-size=N is another number of slots"
    )


def _print_sliding(report: FitReport) -> None:
    found = report.of_kind("INT2")
    cache, pools = found.cache, found.pools
    row, rows, sliding = cache.sinks + cache.ring, pools.requests + 1, pools.sliding or 0
    left = report.room - rows * row - sliding * cache.window_token
    terminal.prose(
        f"INT2: {report.room:,} - {rows:,} x {row:,} sinks and rings - {sliding:,} x"
        f" {cache.window_token:,} sliding slots = {left:,}; {left:,} / {cache.token:,} ="
        f" {pools.tokens:,} tokens"
    )
