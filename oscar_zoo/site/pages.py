"""The pages of the zoo, made of entries of the registry by the templates beside this file.

They are made of what is shown and nothing else: no clock, no network, no place of this machine, so
the same input gives the same bytes. Every value is escaped where a template writes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from shlex import quote
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import ValidationError

from oscar_zoo.artifact.specs import Score
from oscar_zoo.compute.report.data import ClipChart, ReportData, Spectra
from oscar_zoo.engines.sglang.capacity import USABLE, Cache, room
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.index import ACCEPTED
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import value_text
from oscar_zoo.site import charts
from oscar_zoo.version import __version__

INDEX = "index.html"
PAPER = "https://arxiv.org/abs/2605.17757"
GIB = 1 << 30
MEMORY = 80
"""GiB of the GPU that the table of what fits is made for; `fit.js` makes it for others."""
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
_COLUMNS = (
    ("Model", "text"),
    ("Family", "text"),
    ("Bits", "number"),
    ("GPQA BF16", "number"),
    ("GPQA INT2", "number"),
    ("Perplexity", "number"),
    ("Recall", "number"),
    ("Size", "number"),
    ("Status", "text"),
    ("Digest", "text"),
)
"""Heads of the table and how they sort. A cell has the head too, for narrow screens."""
_BELOW_GATE = {"poor": "poor quality", "unmeasured": "not measured"}
"""What was published in spite of the quality gate, below the status."""
_RANGE = "The light area covers all layers, the dark one half of them, the line is the middle one."
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class Exhibit:
    """One artifact and what was found about it: the kinds of KV cache of its model by number of
    GPUs, each on one of them, none where the shapes are not known or no INT2 cache takes them;
    bytes of its weights in BF16; how many GPUs it starts from; whether a server divides the memory
    between tokens and what other layers keep, and what nobody knows of those layers, in words; the
    report of its fit and the spectra of its rotation files, where they are there."""

    entry: Entry
    caches: Mapping[int, tuple[Cache, ...]] = field(default_factory=dict)
    weights: int | None = None
    gpus: int = 1
    divided: bool = False
    unknown: str | None = None
    report: ReportData | None = None
    spectra: Spectra | None = None

    @property
    def path(self) -> str:
        """From the root of the site; names of artifacts are safe in paths."""
        return f"artifacts/{self.entry.id.model}/{self.entry.id.tag}.html"

    def tokens(self, kind: str) -> int:
        return next(cache.token for cache in self.caches[1] if cache.kind == kind)

    @property
    def int2_request(self) -> int:
        """Bytes that each request takes in BF16."""
        kinds = self.caches.get(1, self.caches[self.gpus])
        return next(cache.request for cache in kinds if cache.kind == "INT2")


def pages_of(
    exhibits: Sequence[Exhibit], recipes: Sequence[ModelRecipe]
) -> Iterator[tuple[str, bytes]]:
    """Path from the root and content of every file; `recipes` are of models without an artifact."""
    yield INDEX, index_page(exhibits, recipes)
    for exhibit in exhibits:
        yield exhibit.path, artifact_page(exhibit)
    yield ".nojekyll", b""


def index_page(exhibits: Sequence[Exhibit], recipes: Sequence[ModelRecipe]) -> bytes:
    entries = [exhibit.entry for exhibit in exhibits]
    return _page(
        "index.html",
        ("table.js",),
        title="oscar-zoo",
        description=f"{len(exhibits)} rotations for 2-bit KV caches, with their quality.",
        root="",
        wide=True,
        paper=PAPER,
        exhibits=exhibits,
        recipes=recipes,
        models=len({entry.id.model.casefold() for entry in entries}),
        families=sorted({e.family for e in entries if e.family}, key=str.casefold),
        columns=_COLUMNS,
        accepted=_BELOW_GATE,
        words=_words,
        scale=_scale(entries),
        pair_chart=charts.pair_chart,
    )


def artifact_page(exhibit: Exhibit) -> bytes:
    """How good one artifact is, how to use it, whether it fits, how it was made."""
    entry = exhibit.entry
    return _page(
        "artifact.html",
        ("fit.js", "copy.js"),
        title=f"{entry.id.model} {entry.id.tag}",
        description=_summary(entry),
        root="../../",
        wide=False,
        exhibit=exhibit,
        entry=entry,
        although=ACCEPTED,
        commands=_commands(entry),
        memory=MEMORY,
        usable=f"{100 * USABLE:.0f}",
        needs=_needs(exhibit),
        fits=list(_fits(exhibit)),
        groups=list(filter(None, (_clips(exhibit), _spectra(exhibit), _errors(exhibit)))),
        history_chart=charts.history_chart,
        hub_link=_hub_link,
    )


def _page(template: str, scripts: Sequence[str], **given: Any) -> bytes:
    style, codes = _resource("style.css"), [_resource(name) for name in scripts]
    policy = (
        f"default-src 'none'; style-src {_hash(style)};"
        f" script-src {' '.join(map(_hash, codes))}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    frame = {"style": style, "scripts": codes, "policy": policy, "version": __version__}
    text = _templates().get_template(template).render(**given, **frame)
    return (_without_gaps(text).rstrip() + "\n").encode()


def _without_gaps(text: str) -> str:
    """`text` without empty lines; no value has a line of its own, and what has a hash has none."""
    return re.sub(r"\n\s*\n", "\n", text)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("oscar_zoo.site"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=charts.shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (counted, percent_change, share, size, value_of, unit_of)
    found.globals |= {function.__name__: function for function in functions}
    found.filters |= {"casefold": str.casefold, "plain": charts.shown}
    return found


@cache
def _resource(name: str) -> Markup:
    text = resources.files("oscar_zoo.site").joinpath(name).read_text("utf-8")
    return Markup(_without_gaps(text))


def _hash(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"


def _words(entry: Entry) -> str:
    """What the search of the first page looks in."""
    facts = (str(entry.id), entry.model_id, entry.digest, entry.family, entry.status.state)
    accepted = [_BELOW_GATE[one] for one in entry.accepted]
    return " ".join(filter(None, (*facts, *accepted))).casefold()


def _scale(entries: Iterable[Entry]) -> tuple[float, float] | None:
    """The range of all GPQA values with their errors."""
    scores = filter(None, (entry.gpqa for entry in entries))
    every = [one for score in scores for one in (score, score.baseline) if one]
    known = [(one.value, one.stderr or 0) for one in every if one.value is not None]
    ends = [value + sign * error for value, error in known for sign in (-1, 1)]
    return (min(ends) - 1, max(ends) + 1) if ends else None


def _summary(entry: Entry) -> str:
    facts = (
        ("GPQA", value_of(entry.gpqa, unit=True)),
        ("perplexity", percent_change(entry.perplexity_change)),
        ("recall", share(entry.recall)),
    )
    known = ", ".join(f"{name} {value}" for name, value in facts if value)
    end = f": {known}." if known else "."
    return f"A rotation for a 2-bit KV cache of {entry.id.model}{end}"


def _commands(entry: Entry) -> list[list[str]]:
    """The words of the commands to copy; none for what no name finds."""
    name = [entry.id.reference, *(["--hub", quote(entry.hubs[0])] if entry.hubs else [])]
    model = [] if can_be_found(entry.model_id or entry.id.model) else ["--model", "FOLDER"]
    found = [["oscar-zoo", "serve", *name, *model], ["oscar-zoo", "pull", *name]]
    return [] if entry.status.state == "yanked" else found


def _needs(exhibit: Exhibit) -> str:
    """What `fit.js` computes from: bytes of a token and of a request for each kind of cache."""
    kinds = {str(n): [asdict(one) for one in found] for n, found in exhibit.caches.items()}
    given = {"usable": USABLE, "contexts": CONTEXTS, "caches": kinds, "memory_unit": GIB}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def _fits(exhibit: Exhibit) -> Iterator[tuple[str, list[str]]]:
    """Requests that run at a time for each context, by kind of cache."""
    kinds = exhibit.caches.get(exhibit.gpus, ())
    for context in CONTEXTS:
        numbers = list[int]()
        if exhibit.weights is not None:
            left = room(MEMORY * GIB, exhibit.weights, Layout(tp=exhibit.gpus))
            numbers = [one.requests(left, context) for one in kinds]
        # with thin spaces between thousands
        head, *counts = (f"{n:,}".replace(",", "\u202f") for n in (context, *numbers))
        yield head, counts or ["–"] * len(kinds)


_Group = tuple[str, str, list[tuple[str, Markup]]]
"""Title, what to look for, and charts with their names."""


def _clips(exhibit: Exhibit) -> _Group | None:
    found = dict(_clip_curves(exhibit))
    words = (
        "Error against the share of a row's range that is kept, where the error at the largest"
        " ratio is 1. The thick line is the mean."
    )
    words += f" {_RANGE}" if any(chart.layers for chart in found.values()) else ""
    drawn = [(name, charts.clip_chart(name, one)) for name, one in found.items()]
    return ("Clip curves", words, drawn) if drawn else None


def _clip_curves(exhibit: Exhibit) -> Iterator[tuple[str, ClipChart]]:
    """The curves of the report, which has every layer, else the means of the manifest."""
    clip = exhibit.report.clip if exhibit.report else None
    if clip is not None:
        yield from ((n, c) for n, c in (("Keys", clip.k), ("Values", clip.v)) if c is not None)
        return
    manifest = exhibit.entry.manifest
    curves = _object(_object(manifest.quality if manifest else None).get("clip"))
    for name, side, error in (("Keys", "k", "retrieval"), ("Values", "v", "output")):
        block = _object(curves.get(side))
        served = getattr(manifest.recipe.clip, side) if manifest else None
        try:
            yield name, ClipChart.model_validate(_curve(block, error, served))
        except (ValidationError, TypeError, ValueError):
            continue  # a manifest may hold anything here


def _curve(block: dict[str, Any], error: str, served: float | None) -> dict[str, Any]:
    """A ratio of 0 clips nothing, and so does 1, where it belongs on an axis."""
    pairs = zip(block.get("ratios", ()), block.get("errors", ()), strict=True)
    points = sorted((float(ratio or 1.0), float(value)) for ratio, value in pairs)
    ratios, mean = zip(*points, strict=True)
    curve = {"error": error, "ratios": ratios, "layers": (), "mean": mean}
    return curve | {"chosen": served or 1.0}


def _spectra(exhibit: Exhibit) -> _Group | None:
    spectra = (exhibit.report.spectra if exhibit.report else None) or exhibit.spectra
    if spectra is None:
        return None
    words = (
        "Share of each eigenvalue in the sum. The steeper the fall, the more a few directions hold,"
        f" and the more a rotation has to spread. {_RANGE}"
    )
    both = (("Keys", spectra.k), ("Values", spectra.v))
    return "Spectra", words, [(name, charts.spectrum_chart(name, one)) for name, one in both]


def _errors(exhibit: Exhibit) -> _Group | None:
    manifest = exhibit.entry.manifest
    found = _object(_object(manifest.quality if manifest else None).get("errors")).get("output")
    errors = found if isinstance(found, list) else []
    good = all(type(one) in (int, float) and 0 <= one < 1e60 for one in errors)
    layers = manifest.model.attention_layers if manifest else ()
    if not good or not layers or len(errors) != len(layers):
        return None
    words = "Relative squared error of the attention output with the served settings."
    return "Error by layer", words, [("Output", charts.layers_chart(layers, errors))]


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _hub_link(repo: str | None) -> str | None:
    """A link to a repository of Hugging Face, or only its name where that is no name of one."""
    if repo is None or _REPO.fullmatch(repo) is None:
        return repo
    href = f"https://huggingface.co/{repo}"
    return charts.tag("a", repo, href=href, rel="noopener noreferrer")


def counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


def value_of(score: Score | None, *, unit: bool = False) -> str | None:
    """A value with its standard error; `None` where there is none."""
    text = value_text(score)
    return f"{text} {unit_of(score)}".rstrip() if score and text and unit else text


def unit_of(score: Score) -> str:
    """The unit in a few characters; empty where it is the metric itself, such as perplexity."""
    return "%" if score.unit == "percent" else "" if score.unit == score.metric else score.unit


def percent_change(change: float | None) -> str | None:
    if change is None:
        return None
    return f"{change:+.2f} %" if abs(change) < 1000 else f"{change:+.2e} %"


def share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def size(nbytes: int | None) -> str | None:
    if nbytes is None:
        return None
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    large = (f"{nbytes / divisor:.1f} {unit}" for unit, divisor in units if nbytes >= divisor)
    return next(large, f"{nbytes} B")
