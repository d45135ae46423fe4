"""The charts of an artifact, from the report of its fit, its manifest and its rotation files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from oscar_zoo.compute.report.data import ClipChart
from oscar_zoo.site import numbers, tables
from oscar_zoo.site.charts import clip_chart, layers_chart, spectrum_chart
from oscar_zoo.site.exhibit import Exhibit
from oscar_zoo.site.html import Html, element
from oscar_zoo.site.tables import Row

_RANGE = "The light area covers all layers, the dark one half of them, the line is the middle one."


def figure_section(exhibit: Exhibit) -> Html | None:
    """All charts that there are numbers for, each with what to look for; `None` without any."""
    groups = [group for group in (_clips(exhibit), _spectra(exhibit), _errors(exhibit)) if group]
    table = _candidates(exhibit)
    if not groups and table is None:
        return None
    return element("section", element("h2", "How it was made", id="fit-charts"), table, groups)


def _spectra(exhibit: Exhibit) -> Html | None:
    spectra = exhibit.report.spectra if exhibit.report else None
    spectra = spectra or exhibit.spectra
    if spectra is None:
        return None
    charts = (("Keys", spectra.k), ("Values", spectra.v))
    return _group(
        "Spectra",
        "Share of each eigenvalue in the sum. The steeper the fall, the more a few directions hold,"
        f" and the more a rotation has to spread. {_RANGE}",
        [(name, spectrum_chart(name, one)) for name, one in charts],
    )


def _clips(exhibit: Exhibit) -> Html | None:
    found = dict(_clip_curves(exhibit))
    if not found:
        return None
    layers = any(chart.layers for chart in found.values())
    return _group(
        "Clip curves",
        "Error against the share of a row's range that is kept, where the error at the largest"
        " ratio is 1. The thick line is the mean." + (f" {_RANGE}" if layers else ""),
        [(name, clip_chart(name, chart)) for name, chart in found.items()],
    )


def _clip_curves(exhibit: Exhibit) -> Iterable[tuple[str, ClipChart]]:
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
    return {
        "error": error,
        "ratios": tuple(ratio for ratio, _ in points),
        "layers": (),
        "mean": tuple(value for _, value in points),
        "chosen": served or 1.0,
    }


def _errors(exhibit: Exhibit) -> Html | None:
    manifest = exhibit.entry.manifest
    if manifest is None:
        return None
    found = _object(_object(manifest.quality).get("errors")).get("output")
    errors = found if isinstance(found, list) else []
    layers = manifest.model.attention_layers
    good = all(type(one) in (int, float) and 0 <= one < 1e60 for one in errors)
    if not good or len(errors) != len(layers):
        return None
    return _group(
        "Error by layer",
        "Relative squared error of the attention output with the served settings.",
        [("Output", layers_chart(layers, errors))],
    )


def _candidates(exhibit: Exhibit) -> Html | None:
    """The methods that were tried."""
    comparison = exhibit.report.comparison if exhibit.report else None
    if comparison is None:
        return None
    heads = ("Method", "Clip K", "Clip V", "Perplexity", "Over BF16", "Recall")
    rows = []
    for one in comparison.candidates:
        cells = (
            None if one.clip_k is None else f"{one.clip_k:g}",
            None if one.clip_v is None else f"{one.clip_v:g}",
            None if one.perplexity is None else f"{one.perplexity:.4g}",
            numbers.percent_change(one.change_percent),
            numbers.share(one.recall),
        )
        kept = [element("span", "kept", class_="who measured")] if one.chosen else []
        method = [element("span", f"{one.method} "), *kept]
        rows.append(Row(method, cells, "kept" if one.chosen else None))
    name = "Methods that were tried, on text that was not calibrated on"
    return tables.table(name, heads, rows, right=heads[1:])


def _group(title: str, words: str, charts: list[tuple[str, Html]]) -> Html:
    return element(
        "div",
        element("h3", title),
        element("p", words, class_="remark"),
        element(
            "div",
            [element("figure", element("figcaption", name), chart) for name, chart in charts],
            class_="charts",
        ),
    )


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
