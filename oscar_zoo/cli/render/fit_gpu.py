"""What `fit-gpu` shows."""

from __future__ import annotations

from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.terminal import counted
from oscar_zoo.engines.sglang.capacity import RULES
from oscar_zoo.engines.sglang.sizing import FEWEST, MOST, SHARE, STEP
from oscar_zoo.models.other_layers import STATES_PER_REQUEST
from oscar_zoo.next_step import capitalized
from oscar_zoo.serving.fit_gpu import (
    CONVERSATION,
    GIVEN,
    MACHINE_GPUS,
    OF_RECIPE,
    FitReport,
    FittingCache,
)
from oscar_zoo.serving.memory import fetch_config
from oscar_zoo.serving.params import FitGpuParams

_VERDICTS = {True: "fits", False: "does not fit", None: "not known"}


def print_fit(report: FitReport, params: FitGpuParams, *, quiet: bool) -> None:
    """The answer, and a row for each kind of cache, also whether requests that were asked for
    fit."""
    terminal.prose(_answer(report))
    if report.unknown is not None:
        terminal.prose(_missing(report))
    if report.not_served is not None:
        terminal.prose(capitalized(report.not_served.rstrip(".")))
    terminal.prose(_sums(report))
    if report.memory_source != GIVEN:
        terminal.prose(report.memory_source)
    if report.gpus_source == OF_RECIPE:
        terminal.prose(f"Its recipe asks for {counted(report.gpus, 'GPU')}; --tp is another number")
    if report.room == 0:
        return
    _print_table(report, verdict=params.requests is not None)
    if report.too_long:
        return
    scales = "scales and rotary keys" if report.latents else "scales"
    stored = f"{round(report.bits, 2):g} bits per element with its {scales} ({report.bits_source})"
    terminal.prose(f"INT2 stores {stored}")
    *others, int2 = (one.request_bytes for one in report.caches)
    beside = f", {terminal.megabytes(max(others))} with the others" if max(others) else ""
    more = "" if report.other_layers else ", as far as the zoo knows"
    terminal.prose(
        f"Beside its tokens a running request takes {terminal.megabytes(int2)} with INT2{beside}"
        f"{more}"
    )
    if report.host_tokens:
        terminal.prose(
            f"--host-cache holds {report.host_tokens:,} tokens, or {report.host_requests:,}"
            f" conversations of {CONVERSATION:,}; each takes {report.disk_request_bytes / 1e9:.2f}"
            " GB of a --disk-cache"
        )
    print_terms(report)
    _print_requests(report)
    _print_longest(report)


def _print_table(report: FitReport, *, verdict: bool) -> None:
    context, requests = f"{report.context:,}", f"{report.requests:,}"
    alike = all(one.running == report.requests for one in report.caches)
    heads = ["CACHE", "PER TOKEN", f"TOKENS OF {requests} REQUESTS" if alike else "TOKENS"]
    heads += [] if alike else ["REQUESTS AT A TIME"]
    heads += ["OF EACH", f"REQUESTS OF {context} TOKENS"]
    heads += [f"{requests} x {context}"] if verdict else []
    table = terminal.table(*heads, right=tuple(range(1, len(heads))))
    for one in report.caches:
        cells = [one.kind, f"{one.token_bytes / 1e3:.1f} kB"]
        cells += [_range(one.tokens, one.most_tokens)]
        cells += [] if alike else [f"{one.running:,}" if one.running else "?"]
        cells += [f"{one.context:,}" if one.running else f"0 to {one.context:,}"]
        cells += [_range(one.requests, one.most_requests)]
        cells += [_VERDICTS[one.fits]] if verdict else []
        table.add_row(*cells)
    terminal.out().print(table)


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def percent(share: float) -> str:
    """A share of 1 for people."""
    return f"{100 * share:.0f} %"


def _answer(report: FitReport) -> str:
    """The first line: how many tokens fit, or how many GPUs are enough."""
    where = (
        f"{report.model} on {counted(report.gpus, 'GPU')} of {terminal.gibibytes(report.memory)}"
    )
    if report.fits is False:
        return f"{where} {_too_small(report)}. {_enough(report)}"
    int2, bf16 = report.of_kind("INT2"), report.of_kind("BF16")
    if report.unknown is not None and int2.tokens < int2.most_tokens:
        return f"{where}: {_between(int2)} tokens fit with INT2, and {_between(bf16)} with BF16"
    tokens, plain = _about(int2.tokens), _about(bf16.tokens)
    if int2.running != bf16.running:
        return (
            f"{where}: about {tokens} tokens fit with INT2, with {int2.running:,} requests at a"
            f" time, and {plain} with BF16, with {bf16.running:,}"
        )
    return (
        f"{where}: about {tokens} tokens fit with INT2, and {plain} with BF16, with"
        f" {int2.running:,} requests at a time"
    )


def _between(found: FittingCache) -> str:
    return f"between {_about(found.tokens)} and {_about(found.most_tokens)}"


def _missing(report: FitReport) -> str:
    """What the answer lacks, and how to get it."""
    range_of = "" if report.fits is False else ", so the answer is a range"
    what = f"The zoo does not know {report.unknown} of {report.model}{range_of}"
    if report.config_of is None:
        return f"{what}. Give the folder with its config.json"
    return f"{what}. {capitalized(fetch_config(report.config_of))}, then ask again"


def _too_small(report: FitReport) -> str:
    """Why it does not fit, and how many requests would."""
    int2, requests, context = report.of_kind("INT2"), f"{report.requests:,}", f"{report.context:,}"
    if report.too_long:
        return f"does not fit: a request of {context} tokens is longer than the model takes"
    if report.room == 0:
        return "does not fit: the weights take all memory (quantized ones: --weights SIZE)"
    if not int2.most_requests:
        return f"does not fit: {_no_tokens(report, int2)}"
    why, fewer = f"{requests} requests of {context} tokens", f"{int2.most_requests:,} with INT2"
    if int2.most_tokens < report.context:
        return f"has no room for {why}, but for {fewer}: {_no_tokens(report, int2)}"
    if int2.running == report.requests:
        fewer += f", or {requests} of {int2.context:,} tokens"
    return f"has no room for {why}, but for {fewer}"


def _no_tokens(report: FitReport, int2: FittingCache) -> str:
    """What takes the memory that one request would need for its tokens."""
    room = f"leave room for {int2.most_tokens:,} tokens with INT2"
    if int2.state_bytes:
        return f"weights, windows and states {room}"
    windows = f"the windows of {counted(report.requests, 'request')}"
    beside = int2.request_bytes * report.requests
    if beside >= report.room:
        left = terminal.gigabytes(report.room)
        return f"{windows} take {terminal.gigabytes(beside)}, and the weights leave {left}"
    return f"the weights and {windows} {room}"


def _enough(report: FitReport) -> str:
    """How many GPUs are enough, or the longest context where the model takes no such one."""
    number = report.fitting_gpus
    if report.too_long:
        return f"{report.model} takes {report.longest:,} tokens at most: --context {report.longest}"
    if number is None:
        return "One such GPU is too small, and no number of them that can share its cache is enough"
    share = "are enough" if report.other_layers else "may be enough"
    many = f"{counted(number, 'GPU')} of this size {share}: --tp {number}"
    if number > MACHINE_GPUS:
        return f"{many}; `serve` runs on one machine, and most have {MACHINE_GPUS} at most"
    return many


def _about(number: int) -> str:
    """A number with three digits that count."""
    return f"{int(float(f'{number:.2e}')):,}"


def _sums(report: FitReport) -> str:
    """What the memory of a GPU is divided into."""
    gigabytes = terminal.gigabytes
    part = "" if report.gpus == 1 else f" of the {gigabytes(report.weights.nbytes)}"
    each = "" if report.gpus == 1 else " of each GPU"
    left = f"{gigabytes(report.room)}{each}" if report.room else "nothing"
    whole = f" ({terminal.gibibytes(report.memory)})"
    return (
        f"This is an estimate: {gigabytes(report.memory)}{whole}{each} less"
        f" {gigabytes(report.reserved)} for the engine ({percent(1 - report.usable)}) less"
        f" {gigabytes(report.gpu_weights)}{part} of weights ({report.weights.source}) leave"
        f" {left} for a cache"
    )


def _print_requests(report: FitReport) -> None:
    """How many requests `serve` lets run, why so many, and the flag for more that fit."""
    terminal.prose(
        f"`serve` lets {report.usual_requests:,} requests run at a time here: what they take beside"
        f" their tokens gets {percent(SHARE)} of the memory, in steps of {STEP}, {FEWEST} at least"
        f" and {MOST} at most"
    )
    int2 = report.of_kind("INT2")
    if 0 < int2.running < report.requests:
        terminal.prose(f"With INT2 there are states for {int2.running:,} requests at a time")
    most = max(report.requests, min(int2.requests, MOST))
    if report.fits and most > report.usual_requests:
        terminal.prose(
            f"For {most:,} at a time: oscar-zoo serve ... -- {RULES[report.engine].requests}={most}"
        )


def _print_longest(report: FitReport) -> None:
    """What the model takes at most, where that is less than what would fit."""
    longest = report.longest
    if longest and any(one.tokens > one.context * report.requests for one in report.caches):
        terminal.prose(
            f"By its configuration a request of {report.model} has {longest:,} tokens at most"
        )


def print_terms(report: FitReport) -> None:
    """The division of the memory of a GPU, and that of its cache."""
    each = "" if report.gpus == 1 else f" of each of {report.gpus} GPUs"
    terminal.prose(
        f"In bytes{each}: {report.memory:,} - {report.reserved:,} reserved -"
        f" {report.gpu_weights:,} weights = {report.room:,} for a cache"
    )
    found = report.of_kind("INT2")
    cache, pools = found.cache, found.pools
    if pools.states:
        _print_pools(report, pools.states + 1, cache.state // STATES_PER_REQUEST, "states")
        terminal.prose(
            f"A request takes up to {STATES_PER_REQUEST} state slots, its own and those of the"
            " prefix cache; `serve` divides the rest between states and tokens, and"
            " -- --max-mamba-cache-size=N is another number of slots"
        )
    elif pools.sliding is not None:
        _print_pools(report, pools.sliding, cache.window_token, "sliding slots")
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
        f"{found.kind}, a request of {context:,} tokens: {' + '.join(terms)} = {total:,};"
        f" {report.room:,} / {total:,} = {found.requests:,} requests"
    )


def _print_pools(report: FitReport, slots: int, each: int, what: str) -> None:
    found = report.of_kind("INT2")
    cache, pools = found.cache, found.pools
    row, rows = cache.sinks + cache.ring, pools.requests + 1
    left = report.room - rows * row - slots * each
    terminal.prose(
        f"INT2: {report.room:,} - {rows:,} x {row:,} sinks and rings - {slots:,} x {each:,} {what}"
        f" = {left:,}; {left:,} / {cache.token:,} = {pools.tokens:,} tokens"
    )
