"""Does it fit: how many requests of some context run at a time on GPUs of some size.

The build writes the bytes of a token and of a request for each kind of cache. The table is made
here for one size of GPU, and `fit.js` makes it again for the sizes that a reader enters, by the
same rule as `Cache.requests`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from oscar_zoo.engines.sglang.capacity import USABLE, Cache, room
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.site import numbers
from oscar_zoo.site.exhibit import Exhibit
from oscar_zoo.site.html import Html, element

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
GIB = 1 << 30
MEMORY = 80
"""GiB of the GPU that the table is made for."""
CARDS = (16, 24, 32, 48, 80, 96, 140, 180)
"""GiB of GPUs that people have, offered as suggestions."""


def fit_section(exhibit: Exhibit) -> Html | None:
    """The table and its form; `None` where no shapes are known."""
    if exhibit.gpus not in exhibit.caches:
        return None
    return element(
        "section",
        element("h2", "Does it fit my GPU?", id="fit"),
        element(
            "p",
            "Requests that run at a time, each with a context of so many tokens, on ",
            element("output", _place(exhibit), id="place", for_="memory gpus weights"),
            f". {100 * USABLE:.0f} % of the memory is for weights and cache. {_rule(exhibit)} ",
            element("code", _command(exhibit)),
            " counts that too." if exhibit.divided else ".",
            "" if exhibit.unknown is None else f" The zoo does not know {exhibit.unknown}.",
        ),
        _form(exhibit),
        element("div", _table(exhibit), class_="table", role="region", tabindex="0",
                aria_label="Requests that fit"),
        _sizes(exhibit),
        id="fit-section",
        data_needs=json.dumps(_needs(exhibit), sort_keys=True, separators=(",", ":")),
    )  # fmt: skip


def _rule(exhibit: Exhibit) -> str:
    """How requests are counted, before the name of the command."""
    if not exhibit.divided:
        return "The estimate is that of"
    return (
        "It counts what requests need. A server divides its memory before they come, so fewer may"
        " fit:"
    )


def _command(exhibit: Exhibit) -> str:
    return "oscar-zoo fit-gpu" + (f" {exhibit.entry.id.model}" if exhibit.divided else "")


def _place(exhibit: Exhibit) -> str:
    gpus = "1 GPU" if exhibit.gpus == 1 else f"{exhibit.gpus} GPUs"
    return f"{gpus} of {MEMORY} GiB"


def _needs(exhibit: Exhibit) -> dict[str, object]:
    """What `fit.js` computes from."""
    kinds = {
        str(gpus): [asdict(cache) for cache in exhibit.caches[gpus]] for gpus in exhibit.caches
    }
    return {"usable": USABLE, "contexts": CONTEXTS, "caches": kinds, "memory_unit": GIB}


def _form(exhibit: Exhibit) -> Html:
    weights = None if exhibit.weights is None else f"{exhibit.weights / 1e9:.5g}"
    return element(
        "div",
        element(
            "p",
            element("label", "Memory of a GPU, GiB", for_="memory"),
            element("input", id="memory", type="number", min="1", max="2000", step="any",
                    value=MEMORY, list="cards", inputmode="decimal"),
            element("datalist", [element("option", value=size) for size in CARDS], id="cards"),
        ),
        element(
            "p",
            element("label", "GPUs", for_="gpus"),
            element("select", [
                element("option", str(n), value=n, selected=n == exhibit.gpus)
                for n in sorted(exhibit.caches)
            ], id="gpus"),
        ),
        element(
            "p",
            element("label", "Weights, GB", for_="weights"),
            element("input", id="weights", type="number", min="0", step="any", value=weights,
                    inputmode="decimal"),
        ),
        class_="controls",
        id="fit-form",
        hidden=True,
    )  # fmt: skip


def _table(exhibit: Exhibit) -> Html:
    kinds = exhibit.caches[exhibit.gpus]
    return element(
        "table",
        element(
            "caption",
            "Requests at a time by context in tokens and by kind of KV cache",
            class_="hide",
        ),
        element(
            "thead",
            element(
                "tr",
                element("th", "Context", scope="col"),
                [element("th", cache.kind, scope="col", class_="n") for cache in kinds],
            ),
        ),
        element("tbody", [_row(exhibit, kinds, context) for context in CONTEXTS], id="fits"),
    )


def _row(exhibit: Exhibit, kinds: Sequence[Cache], context: int) -> Html:
    cells = []
    for cache in kinds:
        if exhibit.weights is None:
            text = numbers.NONE
        else:
            left = room(MEMORY * GIB, exhibit.weights, Layout(tp=exhibit.gpus))
            text = numbers.count(cache.requests(left, context))
        cells.append(element("td", text, class_="n"))
    return element("tr", element("th", numbers.count(context), scope="row"), cells)


def _sizes(exhibit: Exhibit) -> Html:
    kinds = exhibit.caches[1] if 1 in exhibit.caches else exhibit.caches[exhibit.gpus]
    each = ", ".join(f"{cache.kind} {numbers.size(cache.token)}" for cache in kinds)
    extra = next(cache.request for cache in kinds if cache.kind == "INT2")
    known = (
        "The zoo does not know the size of the weights."
        if exhibit.weights is None
        else f"Weights: about {numbers.size(exhibit.weights)}."
    )
    return element(
        "p",
        f"A token takes: {each}. INT2 also keeps the first and the last tokens of each request in"
        f" BF16: {numbers.size(extra)}. {known}",
        class_="remark",
    )
