"""The report of a moments file alone: spectra of the targets, and headroom over rotations."""

from __future__ import annotations

import numpy as np
import torch

from oscar_zoo.compute import coverage
from oscar_zoo.compute.estimators import estimate
from oscar_zoo.compute.methods.parallel import each_layer
from oscar_zoo.compute.methods.wush import headroom
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo
from oscar_zoo.compute.report.data import Fact, Headroom, PerLayer, ReportData, Spectra, Spectrum


def report_of_moments(moments: Moments, info: MomentsInfo) -> ReportData:
    """A report without methods, of the moments in one file."""
    coverage.check(moments, {"rows"})
    return ReportData(
        title=f"{info.model.id}, moments",
        layers=tuple(sorted(moments.layers)),
        facts=_facts(moments, info),
        spectra=spectra_of(moments),
        headroom=headroom_of(moments),
        notes=("These moments are a part of a capture.",) if info.partial else (),
    )


def spectra_of(moments: Moments) -> Spectra:
    """Eigenvalues of both targets, mean over heads.

    Keys use `qqt/1`. Values use `sst/1`, or another estimator when the moments lack its sums.
    """
    layers = moments.layers.values()
    if all(layer.weighted_tokens == layer.tokens for layer in layers):
        value = "sst/1"
    elif all(layer.output_rows == layer.query_rows for layer in layers):
        value = "oo/1"
    else:
        value = "vv/1"
    return Spectra(k=_spectrum(moments, "qqt/1"), v=_spectrum(moments, value))


def headroom_of(moments: Moments) -> Headroom | None:
    """Mean headroom of the heads of each layer.

    `None` when output weights are missing or a matrix is singular.
    """
    if any(layer.wo is None for layer in moments.layers.values()):
        return None
    try:
        return Headroom(k=_headroom(moments, "kk/1", "qqt/1"), v=_headroom(moments, "vv/1", "wo/1"))
    except torch.linalg.LinAlgError:
        return None


def _spectrum(moments: Moments, estimator: str) -> Spectrum:
    return Spectrum.of(estimator, np.linalg.eigvalsh(estimate(moments, estimator)).tolist())


def _headroom(moments: Moments, gram: str, hessian: str) -> PerLayer:
    pairs = zip(
        *(torch.from_numpy(estimate(moments, name, "kv_head")) for name in (gram, hessian)),
        strict=True,
    )
    return tuple(each_layer(lambda pair: float(headroom(*pair).mean()), tuple(pairs)))


def _facts(moments: Moments, info: MomentsInfo) -> tuple[Fact, ...]:
    shape = info.model
    widths = (
        f"{shape.head_dim}"
        if shape.head_dim == shape.v_head_dim
        else f"{shape.head_dim}/{shape.v_head_dim}"
    )
    layers = (
        f"{len(moments.layers)} layers, {shape.num_q_heads} query and {shape.num_kv_heads} KV heads"
        f" of {widths}"
    )
    engine = info.numerics.engine
    facts = {
        "Model": f"{shape.id}, {layers}",
        "Calibration": f"{moments.tokens:,} tokens in {len(info.sequences):,} sequences",
        "Data": info.calibration.dataset if info.calibration else None,
        "Engine": (
            f"{engine.name} {engine.version or ''}".rstrip() + f", {info.numerics.forward_dtype}"
        ),
        "Device": info.numerics.device,
    }
    return tuple(Fact(label=label, value=value) for label, value in facts.items() if value)
