"""What `fit-gpu` shows."""

from __future__ import annotations

from oscar_zoo.app.fit_gpu import MACHINE_GPUS
from oscar_zoo.app.fit_report import FitReport
from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang.concurrency import FEWEST, MOST, SHARE, STEP
from oscar_zoo.next_step import capitalized


def emit_fit(report: FitReport) -> None:
    """The JSON of `fit-gpu`."""
    facts = {
        "model": report.model,
        "estimate": True,
        "memory_bytes": report.memory,
        "usable_share": report.usable,
        "gpus": report.gpus,
        "weights_bytes": report.weights.nbytes,
        "reserved_bytes": report.reserved,
        "gpu_weights_bytes": report.gpu_weights,
        "weights_source": report.weights.source,
        "cache_bytes": report.room,
        "context": report.context,
        "model_context": report.longest,
        "requests": report.requests,
        "usual_requests": report.usual_requests,
        "bits_per_element": report.bits,
        "bits_source": report.bits_source,
        "other_layers_counted": report.other_layers,
        "fits": report.fits,
        "fitting_gpus": report.fitting_gpus,
        "not_served": report.not_served,
        "caches": [
            {
                "kind": one.cache.kind,
                "token_bytes": one.cache.token,
                "window_token_bytes": one.cache.window_token,
                "window": one.cache.window,
                "request_bytes": one.cache.request,
                "sink_bytes": one.cache.sinks,
                "ring_bytes": one.cache.ring,
                "state_bytes": one.cache.state,
                "tokens": one.tokens,
                "max_requests": one.requests,
                "max_context": one.context,
                "fits": one.fits,
            }
            for one in report.caches
        ],
    }
    terminal.emit_json({"schema": "oscar-zoo.fit-gpu/1"} | facts)


def print_fit(report: FitReport, *, verdict: bool) -> None:
    """The answer, and a row for each kind of cache; with `verdict` also whether the requests that
    were asked for fit."""
    terminal.prose(_answer(report))
    if report.not_served is not None:
        terminal.prose(capitalized(report.not_served.rstrip(".")))
    terminal.prose(_sums(report))
    if report.room == 0:
        return
    context, requests = f"{report.context:,}", f"{report.requests:,}"
    heads = ["CACHE", "PER TOKEN", f"TOKENS OF {requests} REQUESTS", "OF EACH"]
    heads += [f"REQUESTS OF {context} TOKENS"]
    heads += [f"{requests} x {context}"] if verdict else []
    table = terminal.table(*heads, right=tuple(range(1, len(heads))))
    for one in report.caches:
        cells = [
            one.cache.kind,
            f"{one.cache.token / 1e3:.1f} kB",
            f"{one.tokens:,}",
            f"{one.context:,}",
            f"{one.requests:,}",
        ]
        cells += ["fits" if one.fits else "does not fit"] if verdict else []
        table.add_row(*cells)
    terminal.out().print(table)
    terminal.prose(
        f"INT2 stores {report.bits:g} bits per element with its scales ({report.bits_source})"
    )
    *others, int2 = (one.cache.request for one in report.caches)
    beside = f", {terminal.megabytes(max(others))} with the others" if max(others) else ""
    terminal.prose(
        f"Beside its tokens a running request takes {terminal.megabytes(int2)} with INT2{beside}"
    )
    _print_terms(report)
    _print_requests(report)
    _print_longest(report)
    if not report.other_layers:
        terminal.prose(
            "Its layers without full attention are not counted, because the zoo does not know"
            " them. Give the folder with its config.json"
        )


def percent(share: float) -> str:
    """A share of 1 for people."""
    return f"{100 * share:.0f} %"


def _answer(report: FitReport) -> str:
    """The first line: how many tokens fit, or how many GPUs are enough."""
    where = f"{report.model} on {_gpus(report.gpus)} of {terminal.gigabytes(report.memory)}"
    if not report.fits:
        return f"{where} does not fit: {_too_small(report)}. {_enough(report)}"
    int2, bf16 = (_about(report.of_kind(kind).tokens) for kind in ("INT2", "BF16"))
    about = "about" if report.other_layers else "at most"
    return (
        f"{where}: {about} {int2} tokens fit with INT2, and {bf16} with BF16, with"
        f" {report.requests:,} requests at a time"
    )


def _too_small(report: FitReport) -> str:
    """Why it does not fit."""
    tokens = report.of_kind("INT2").tokens
    if report.room == 0:
        return "the weights take all memory"
    if tokens < report.context:
        return f"the weights leave room for {tokens:,} tokens with INT2"
    return f"{report.requests:,} requests of {report.context:,} tokens are too many with INT2"


def _enough(report: FitReport) -> str:
    """How many GPUs are enough."""
    number = report.fitting_gpus
    if number is None:
        return "No number of such GPUs that can share its heads is enough"
    many = f"{_gpus(number)} of this size are enough: --tp {number}"
    if number > MACHINE_GPUS:
        return f"{many}; `serve` runs on one machine, and most have {MACHINE_GPUS} at most"
    return many


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _about(number: int) -> str:
    """A number with three digits that count."""
    return f"{int(float(f'{number:.2e}')):,}"


def _sums(report: FitReport) -> str:
    """What the memory of a GPU is divided into."""
    gigabytes = terminal.gigabytes
    part = "" if report.gpus == 1 else f" of the {gigabytes(report.weights.nbytes)}"
    each = "" if report.gpus == 1 else " of each GPU"
    return (
        f"This is an estimate: {gigabytes(report.memory)}{each} less"
        f" {gigabytes(report.reserved)} for the engine ({percent(1 - report.usable)}) less"
        f" {gigabytes(report.gpu_weights)}{part} of weights ({report.weights.source}) leave"
        f" {gigabytes(report.room)}{each} for a cache"
    )


def _print_requests(report: FitReport) -> None:
    """How many requests `serve` lets run, why so many, and the flag for more that fit."""
    terminal.prose(
        f"`serve` lets {report.usual_requests:,} requests run at a time here: what they take beside"
        f" their tokens gets {percent(SHARE)} of the memory, in steps of {STEP}, {FEWEST} at least"
        f" and {MOST} at most"
    )
    most = max(report.requests, min(report.of_kind("INT2").requests, MOST))
    if report.fits and most > report.usual_requests:
        terminal.prose(
            f"For {most:,} at a time: oscar-zoo serve ... -- --max-running-requests={most}"
        )


def _print_longest(report: FitReport) -> None:
    """What the model takes at most, where that is less than what was asked for or would fit."""
    longest = report.longest
    if longest is None:
        return
    refused = ", and SGLang refuses longer ones" if report.context > longest else ""
    if refused or any(one.tokens > one.context * report.requests for one in report.caches):
        terminal.prose(
            f"By its configuration a request of {report.model} has {longest:,} tokens at"
            f" most{refused}"
        )


def _print_terms(report: FitReport) -> None:
    """The sums behind the row of INT2, in bytes, so that they can be checked by hand."""
    each = "" if report.gpus == 1 else f" of each of {report.gpus} GPUs"
    terminal.prose(
        f"In bytes{each}: {report.memory:,} - {report.reserved:,} reserved -"
        f" {report.gpu_weights:,} weights = {report.room:,} for a cache"
    )
    found = report.caches[-1]
    cache, context = found.cache, report.context
    terms = [f"{context:,} x {cache.token:,}"]
    if cache.window_token:
        terms.append(f"{min(context, cache.window):,} x {cache.window_token:,} windows")
    terms += [f"2 x {cache.sinks // 2:,} sinks", f"{cache.ring:,} ring"]
    terms += [f"{cache.state:,} states"] if cache.state else []
    total = cache.request_bytes(context)
    terminal.prose(
        f"{cache.kind}, a request of {context:,} tokens: {' + '.join(terms)} = {total:,};"
        f" {report.room:,} / {total:,} = {found.requests:,} requests"
    )
    terminal.prose(
        "Sinks count twice: those of a running request, and those of a finished prompt that stays"
        " for the prefix cache"
    )
