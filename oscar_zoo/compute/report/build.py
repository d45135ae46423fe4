"""The report of a job: the numbers that were found, and the files that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.compute.methods.base import each_layer
from oscar_zoo.compute.methods.wush import headroom
from oscar_zoo.compute.moments import Moments, estimate
from oscar_zoo.compute.moments_file import MomentsInfo
from oscar_zoo.compute.report.data import (
    SUFFIX,
    Candidate,
    ClipChart,
    ClipCurves,
    Comparison,
    Fact,
    Headroom,
    MethodErrors,
    ReportData,
    Spectra,
    Spectrum,
)
from oscar_zoo.compute.report.page import write_report
from oscar_zoo.compute.select.attention_errors import ClipCurve
from oscar_zoo.compute.select.decision import Choice, ChoiceRow
from oscar_zoo.errors import MissingDependency


def report_of(
    manifest: Manifest,
    moments: Moments,
    choice: Choice | None,
    notes: Sequence[str],
    seconds: Mapping[str, float],
) -> ReportData:
    """The numbers of a fit that its report shows."""
    fit, model = manifest.fit, manifest.model
    widths = WidthSelection.of(fit.selection)
    shape = f"{len(model.attention_layers)} layers of {model.num_kv_heads} KV heads"
    facts = {
        "model": f"{model.id}, {shape}",
        "method": f"{fit.method}, format_version {manifest.format_version}",
        "digest": manifest.digest or "unknown",
    }
    if fit.calibration is not None:
        used = fit.calibration
        facts["calibration"] = f"{used.dataset}, {used.tokens_used:,} tokens"
    if widths is not None:
        at = sorted((int(length), bits) for length, bits in widths.bits_at.items())
        windows = ", ".join(f"{bits:.3g} at {length // 1024}k" for length, bits in at)
        facts["bits per element"] = f"{widths.kept.bits:.4g}, by {widths.wish}"
        facts["bits with windows"] = windows
    if choice is not None and choice.base is not None:
        facts["perplexity of"] = f"{choice.measured_on}; other text gives other numbers"
    if fit.numerics is not None:
        engine, made = fit.numerics.engine, fit.numerics
        facts["engine"] = f"{engine.name} {engine.version}, {made.forward_dtype}, {made.device}"
    facts |= {f"{phase}, seconds": f"{took:.1f}" for phase, took in seconds.items()}
    return ReportData(
        title=manifest.id,
        layers=model.attention_layers,
        facts=_facts(facts),
        comparison=_comparison(choice) if choice else None,
        errors=_errors(choice) if choice else (),
        clip=_clips(choice) if choice else None,
        headroom=headroom_of(moments),
        spectra=spectra_of(moments),
        widths=widths,
        notes=tuple(notes),
    )


def report_of_moments(moments: Moments, info: MomentsInfo) -> ReportData:
    """A report without methods, of the moments in one file."""
    moments.check({"rows"})
    model, made = info.model, info.numerics
    widths = "/".join(dict.fromkeys((str(model.head_dim), str(model.v_head_dim))))
    heads = f"{model.num_q_heads} query and {model.num_kv_heads} KV heads of {widths}"
    engine = f"{made.engine.name} {made.engine.version or ''}".rstrip()
    facts = {
        "Model": f"{model.id}, {len(moments.layers)} layers, {heads}",
        "Calibration": f"{moments.tokens:,} tokens in {len(info.sequences):,} sequences",
        "Data": info.calibration.dataset if info.calibration else None,
        "Engine": f"{engine}, {made.forward_dtype}",
        "Device": made.device,
    }
    return ReportData(
        title=f"{model.id}, moments",
        layers=tuple(sorted(moments.layers)),
        facts=_facts(facts),
        spectra=spectra_of(moments),
        headroom=headroom_of(moments),
        notes=("These moments are a part of a capture.",) if info.partial else (),
    )


def save_report(target: Path, report: ReportData) -> tuple[Path | None, tuple[str, ...]]:
    """Write `<target>.report.json`, and after a comparison also the page and the picture; the page
    and remarks."""
    base = target.with_name(target.name + SUFFIX)
    with durable.storage_errors(f"cannot write {base}"):
        durable.replace_file(base, report.to_bytes())
    if report.comparison is None and report.widths is None:
        return None, ()
    page = base.with_suffix(".html")
    try:
        write_report(report, page, base.with_suffix(".png"))
    except MissingDependency as error:
        return None, (f"the report was not drawn: {error.message} Later: oscar-zoo plot {base}",)
    return page, ()


def _facts(facts: Mapping[str, str | None]) -> tuple[Fact, ...]:
    return tuple(Fact(label=label, value=value) for label, value in facts.items() if value)


def _comparison(choice: Choice) -> Comparison:
    same = ChoiceRow.__dataclass_fields__.keys() & Candidate.model_fields.keys()
    rows = tuple(
        Candidate(
            output_error=row.output_error_geo,
            chosen=row is choice.chosen,
            **{name: getattr(row, name) for name in same},
        )
        for row in choice.rows
    )
    own = choice.base.answers if choice.base else None
    return Comparison(
        candidates=rows,
        bf16_perplexity=choice.base.perplexity.value if choice.base else None,
        bf16_recall=own.value if own else None,
        reason=choice.reason,
    )


def _errors(choice: Choice) -> tuple[MethodErrors, ...]:
    """Errors of every method with its best clip; the kept method has its served clip."""
    kept = choice.trials[choice.at]
    shown = {name: found.found for name, found in choice.errors.items()}
    shown[kept.method] = kept.errors
    return tuple(MethodErrors(method=name, layers=errors.output) for name, errors in shown.items())


def _clips(choice: Choice) -> ClipCurves | None:
    """Clip curves of the kept method; `None` when the user gave the clip."""
    found, clip = choice.errors[choice.chosen.method], choice.recipe.clip
    if len(found.k_curve.indices) < 2:
        return None

    def chart(curve: ClipCurve, error: str, chosen: float) -> ClipChart:
        return ClipChart(
            error=error,
            ratios=tuple(ratio or 1.0 for ratio in curve.ratios),  # both clip nothing
            layers=curve.layers,
            mean=curve.mean,
            chosen=chosen or 1.0,
        )

    return ClipCurves(
        method=choice.chosen.method,
        k=chart(found.k_curve, "retrieval", clip.k),
        v=chart(found.v_curve, "output", clip.v),
    )


def spectra_of(moments: Moments) -> Spectra:
    """Eigenvalues of both targets, mean over heads. Keys use `qqt/1`. Values use `sst/1`, or
    another estimator when the moments lack its sums."""
    layers = moments.layers.values()
    if all(layer.weighted_tokens == layer.tokens for layer in layers):
        value = "sst/1"
    elif all(layer.output_rows == layer.query_rows for layer in layers):
        value = "oo/1"
    else:
        value = "vv/1"
    k, v = (
        Spectrum.of(name, np.linalg.eigvalsh(estimate(moments, name)).tolist())
        for name in ("qqt/1", value)
    )
    return Spectra(k=k, v=v)


def headroom_of(moments: Moments) -> Headroom | None:
    """Mean headroom of the heads of each layer. `None` when output weights are missing or a matrix
    is singular."""
    if any(layer.wo is None for layer in moments.layers.values()):
        return None

    def of(gram: str, hessian: str) -> tuple[float, ...]:
        stacks = [torch.from_numpy(estimate(moments, one, "kv_head")) for one in (gram, hessian)]
        pairs = list(zip(*stacks, strict=True))
        return tuple(each_layer(lambda pair: float(headroom(*pair).mean()), pairs))

    try:
        return Headroom(k=of("kk/1", "qqt/1"), v=of("vv/1", "wo/1"))
    except torch.linalg.LinAlgError:
        return None
