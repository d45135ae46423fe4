"""Numbers for the charts of an artifact, from hubs in folders: the report beside it, and the
eigenvalues in its rotation files. A hub on the network is not asked for payload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from oscar_zoo.artifact.files import MAX_PAYLOAD_BYTES, read_file
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import SUFFIX as ROTATION
from oscar_zoo.artifact.pairing import PairSide, assign, role_of_name
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.compute.report.data import MAX_BYTES, SUFFIX, ReportData, Spectra, Spectrum
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.view import HubView


def report_of(entry: Entry, views: Sequence[HubView]) -> ReportData | None:
    """The report that `compute` wrote beside the artifact, in the first folder that has one."""
    for folder in _folders(entry, views):
        path = folder.with_name(folder.name + SUFFIX)
        if path.is_file() and not path.is_symlink():
            try:
                return ReportData.from_bytes(read_file(path, max_bytes=MAX_BYTES), what=str(path))
            except OscarZooError:
                continue  # it is not ours, or damaged: the page does without it
    return None


def spectra_of(entry: Entry, views: Sequence[HubView]) -> Spectra | None:
    """Eigenvalues behind the rotations; `None` where no folder has both files with eigenvalues."""
    for folder in _folders(entry, views):
        try:
            sides = [_side(path) for path in sorted(folder.glob(f"*{ROTATION}"))]
        except OscarZooError:
            continue
        if len(sides) != 2:
            continue
        pair = assign(sides)
        k, v = (_spectrum(pair[role].rotations) for role in ("k", "v"))
        if k is not None and v is not None:
            return Spectra(k=k, v=v)
    return None


def _folders(entry: Entry, views: Sequence[HubView]) -> list[Path]:
    hubs = [view.hub for view in views if view.hub.name in entry.hubs]
    roots = [hub.root for hub in hubs if isinstance(hub, LocalHub)]
    return [root / entry.id.model / entry.id.tag for root in roots]


def _side(path: Path) -> PairSide:
    data = read_file(path, max_bytes=MAX_PAYLOAD_BYTES)
    return PairSide(path.name, read_rotation(data, what=path.name), role_of_name(path.name))


def _spectrum(rotations: RotationSet) -> Spectrum | None:
    """Mean over heads; `None` without eigenvalues, and for a matrix without data behind it, whose
    eigenvalues are all the same."""
    layers = []
    for layer in rotations.layers:
        if layer.eigenvalues is None:
            return None
        values = np.asarray(layer.eigenvalues, dtype=np.float64)
        values = values if values.ndim == 1 else values.mean(axis=0)
        if not np.isfinite(values).all() or values.max() <= 0 or values.min() == values.max():
            return None
        layers.append(values.tolist())
    return Spectrum.of(rotations.objective[:60] or "covariance", layers)
