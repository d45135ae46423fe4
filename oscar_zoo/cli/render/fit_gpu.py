"""What `fit-gpu` shows."""

from __future__ import annotations

from oscar_zoo.app.fit_gpu import FitReport
from oscar_zoo.cli.render import terminal


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
        "requests": report.requests,
        "usual_requests": report.usual_requests,
        "bits_per_element": report.bits,
        "bits_source": report.bits_source,
        "other_layers_counted": report.other_layers,
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
    many = "1 GPU" if report.gpus == 1 else f"{report.gpus} GPUs"
    left = terminal.gigabytes(report.room)
    terminal.prose(
        f"{report.model} on {many} of {terminal.gigabytes(report.memory)}, an estimate: weights"
        f" {terminal.gigabytes(report.weights.nbytes)} ({report.weights.source}), so {left} of"
        f" {'the GPU' if report.gpus == 1 else 'each GPU'} are left for a cache"
    )
    if report.room == 0:
        terminal.prose("It does not fit: the weights take all memory. More GPUs: --tp 2")
        return
    context, requests = f"{report.context:,}", f"{report.requests:,}"
    heads = ["CACHE", "PER TOKEN", "TOKENS", f"REQUESTS OF {context}", f"CONTEXT OF {requests}"]
    heads += [f"{requests} x {context}"] if verdict else []
    table = terminal.table(*heads, right=tuple(range(1, len(heads))))
    for one in report.caches:
        cells = [
            one.cache.kind,
            f"{one.cache.token / 1e3:.1f} kB",
            f"{one.tokens:,}",
            f"{one.requests:,}",
            f"{one.context:,}",
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
    most = max(report.requests, report.most_requests)
    if most > report.usual_requests:
        terminal.prose(
            f"`serve` lets {report.usual_requests:,} requests run at a time unless it is told"
            f" another number: oscar-zoo serve ... -- --max-running-requests={most}"
        )
    if not report.other_layers:
        terminal.prose(
            "Its layers without full attention are not counted, because the zoo does not know"
            " them. Give the folder with its config.json"
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
    terms += [f"{cache.sinks:,} sinks", f"{cache.ring:,} ring"]
    terms += [f"{cache.state:,} states"] if cache.state else []
    total = cache.request_bytes(context)
    terminal.prose(
        f"{cache.kind}, a request of {context:,} tokens: {' + '.join(terms)} = {total:,};"
        f" {report.room:,} / {total:,} = {found.requests:,} requests"
    )
