"""The report of a job: the numbers that were found, and the files that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.report.data import (
    SUFFIX,
    Candidate,
    ClipChart,
    ClipCurves,
    Comparison,
    Fact,
    MethodErrors,
    ReportData,
)
from oscar_zoo.compute.report.of_moments import headroom_of, spectra_of
from oscar_zoo.compute.report.page import write_report
from oscar_zoo.compute.select.clip import ClipCurve as Curve
from oscar_zoo.compute.select.decision import Choice
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
    facts = [
        Fact(
            label="model",
            value=(
                f"{model.id}, {len(model.attention_layers)} layers of {model.num_kv_heads} KV heads"
            ),
        ),
        Fact(label="method", value=f"{fit.method}, format_version {manifest.format_version}"),
        Fact(label="digest", value=manifest.digest or "unknown"),
    ]
    if fit.calibration is not None:
        used = fit.calibration
        facts.append(
            Fact(label="calibration", value=f"{used.dataset}, {used.tokens_used:,} tokens")
        )
    facts += _width_facts(WidthSelection.of(fit.selection))
    if choice is not None and choice.base is not None:
        facts.append(
            Fact(
                label="perplexity of", value=f"{choice.measured_on}; other text gives other numbers"
            )
        )
    if fit.numerics is not None:
        engine = fit.numerics.engine
        where = (
            f"{engine.name} {engine.version}, {fit.numerics.forward_dtype}, {fit.numerics.device}"
        )
        facts.append(Fact(label="engine", value=where))
    facts += [
        Fact(label=f"{phase}, seconds", value=f"{took:.1f}") for phase, took in seconds.items()
    ]
    return ReportData(
        title=manifest.id,
        layers=model.attention_layers,
        facts=tuple(facts),
        comparison=_comparison(choice) if choice else None,
        errors=_errors(choice) if choice else (),
        clip=_clips(choice) if choice else None,
        headroom=headroom_of(moments),
        spectra=spectra_of(moments),
        widths=WidthSelection.of(fit.selection),
        notes=tuple(notes),
    )


def _width_facts(found: WidthSelection | None) -> list[Fact]:
    """Bits of an element, alone and with the windows; nothing where no bits were chosen."""
    if found is None:
        return []
    at = sorted((int(length), bits) for length, bits in found.bits_at.items())
    windows = ", ".join(f"{bits:.3g} at {length // 1024}k" for length, bits in at)
    return [
        Fact(label="bits per element", value=f"{found.kept.bits:.4g}, by {found.wish}"),
        Fact(label="bits with windows", value=windows),
    ]


def save_report(target: Path, report: ReportData) -> tuple[Path | None, tuple[str, ...]]:
    """Write `<target>.report.json`, and after a comparison also the page and the picture.

    Returns:
        The page, or `None`; and what the user should know.
    """
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


def _comparison(choice: Choice) -> Comparison:
    rows = tuple(
        Candidate(
            method=row.method,
            clip_k=row.clip_k,
            clip_v=row.clip_v,
            output_error=row.output_error_geo,
            sequences=row.sequences,
            divergence=row.divergence,
            perplexity=row.perplexity,
            change_percent=row.change_percent,
            standard_error=row.standard_error,
            recall=row.recall,
            chosen=row is choice.chosen,
            gate=row.gate,
        )
        for row in choice.rows
    )
    own = choice.questions.own
    return Comparison(
        candidates=rows,
        bf16_perplexity=choice.base.perplexity.value if choice.base else None,
        bf16_recall=own.value if own else None,
        reason=choice.reason,
    )


def _errors(choice: Choice) -> tuple[MethodErrors, ...]:
    """Errors of every method with its best clip; the kept method has its served clip."""
    kept = choice.trials[choice.at]
    shown = {name: found.found for name, found in choice.errors.items()} | {
        kept.method: kept.errors
    }
    return tuple(MethodErrors(method=name, layers=errors.output) for name, errors in shown.items())


def _clips(choice: Choice) -> ClipCurves | None:
    """Clip curves of the kept method, or `None` when the user gave the clip."""
    found, clip = choice.errors[choice.chosen.method], choice.recipe.clip
    if len(found.k_curve.indices) < 2:
        return None
    return ClipCurves(
        method=choice.chosen.method,
        k=_clip_curve(found.k_curve, "retrieval", clip.k),
        v=_clip_curve(found.v_curve, "output", clip.v),
    )


def _clip_curve(curve: Curve, error: str, chosen: float) -> ClipChart:
    """A ratio of 0 clips nothing, and so does 1, where it belongs on an axis."""
    ratios = tuple(ratio or 1.0 for ratio in curve.ratios)
    return ClipChart(
        error=error, ratios=ratios, layers=curve.layers, mean=curve.mean, chosen=chosen or 1.0
    )
