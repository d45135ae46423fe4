"""Build the zoo's page: a static catalogue of the packaged artifacts and of hubs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.durable import check_folder
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.outcome import Verified, says
from oscar_zoo.compute.report.data import MAX_BYTES, SUFFIX, ReportData, Spectra, Spectrum
from oscar_zoo.engines.sglang.capacity import Cache, caches
from oscar_zoo.engines.sglang.launch.plan import check_port_free
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import ConflictError, OscarZooError, UsageError
from oscar_zoo.models.other_layers import OtherLayers
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.lookup import look
from oscar_zoo.registry.verify import check_one
from oscar_zoo.registry.view import HubView
from oscar_zoo.site.facts import Unreachable, needs_of_entry
from oscar_zoo.site.pages import INDEX, Exhibit, pages_of
from oscar_zoo.site.params import SiteParams

MARK = ".oscar-zoo-site"
"""File in the root of a site that says that its pages may be replaced."""
_GPUS = (1, 2, 4, 8)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class BuiltSite:
    """What oscar-zoo site prints: where the page is."""

    output: Annotated[Path, says("Its folder.")]
    index: Annotated[Path, says("The page to open.")]
    artifacts: Annotated[int, Field(ge=0, description="How many it shows.")]
    files: Annotated[int, Field(ge=1, description="How many were written.")]
    nbytes: Annotated[int, Field(ge=1, description="Of all files.", serialization_alias="bytes")]
    unreachable: Unreachable
    schema: Literal["oscar-zoo.site/1"] = "oscar-zoo.site/1"


def build_site(
    output: str | Path = "site", *, hubs: str | Sequence[str] = (), offline: bool = False
) -> BuiltSite:
    """Build the zoo's page.

    Args:
        output: folder of the site; a site that it holds already is replaced.
        hubs: hubs as people write them, shown beside what the package knows.
        offline: refuse hubs on the network.

    Raises:
        ConflictError: the folder has something else in it.
        OscarZooError: the only hub did not answer.
        StorageError: the disk refused.
    """
    named = (hubs,) if isinstance(hubs, str) else tuple(hubs)
    return run(SiteParams(Path(output), hubs=named, offline=offline))


def run(params: SiteParams, observer: Observer = SILENT) -> BuiltSite:
    """Build the site in a folder beside its place, and move it there as a whole."""
    target = params.output.absolute()
    _check(target)
    catalog = Catalog.packaged()
    views: list[HubView] = []
    unreachable: list[OscarZooError] = []
    if params.hubs:
        views, unreachable = look(Sources(params.hubs, offline=params.offline).hubs)
    entries = collect(catalog, views)
    known = {entry.id.model.casefold() for entry in entries}
    recipes = [one for one in catalog.recipes() if one.name.casefold() not in known]
    exhibits = [_exhibit(entry, views) for entry in entries]
    pages = dict(pages_of(exhibits, recipes))
    with durable.storage_errors(f"cannot write {target}"):
        durable.make_folders(target.parent)
        with durable.staged_folder(target.parent) as staged:
            for path, content in [*pages.items(), (MARK, b"")]:
                place = staged / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
            _place(staged, target)
    sizes = (len(exhibits), len(pages), sum(map(len, pages.values())))
    return BuiltSite(target, target / INDEX, *sizes, tuple(unreachable))


def _check(target: Path) -> None:
    """Refuse to replace what is no site, and a place that cannot be written."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UsageError(f"{target} is not a folder.", hint="name a new folder with --output")
    if target.is_dir() and any(target.iterdir()) and not (target / MARK).is_file():
        hint = "name a new or an empty folder with --output"
        raise ConflictError(f"{target} has files that are no site of oscar-zoo.", hint=hint)
    check_folder(target)
    check_folder(target.parent)


def _place(staged: Path, target: Path) -> None:
    """Move what was built to its place. A file of the owner beside it, such as a `CNAME`, stays."""
    durable.make_folders(target)
    for part in sorted(staged.iterdir()):
        place, old = target / part.name, durable.temp_path(target.parent)
        if place.exists():
            place.rename(old)
        part.rename(place)
        if old.is_dir():
            durable.remove_tree(old)
        else:
            old.unlink(missing_ok=True)


def _exhibit(entry: Entry, views: Sequence[HubView]) -> Exhibit:
    # A hub on the network is not asked for payload.
    folders = [
        view.hub.root / entry.id.model / entry.id.tag
        for view in views
        if view.hub.name in entry.hubs and isinstance(view.hub, LocalHub)
    ]
    needs, kinds = needs_of_entry(entry), dict[int, tuple[Cache, ...]]()
    if needs is not None:
        with contextlib.suppress(ValueError):  # the INT2 cache does not take the heads
            kinds = {
                gpus: caches(needs.geometry, needs.serving, Layout(tp=gpus), needs.other)
                for gpus in _GPUS
            }
    return Exhibit(
        entry=entry,
        caches=kinds,
        weights=needs.weights.nbytes if needs and needs.weights else None,
        gpus=needs.gpus if needs and needs.gpus in _GPUS else 1,
        divided=needs is not None and needs.other != OtherLayers(),
        unknown=needs.unknown if needs else None,
        report=_report(folders),
        spectra=_spectra(folders),
    )


def _report(folders: Sequence[Path]) -> ReportData | None:
    """The report that `compute` wrote beside the artifact, in the first folder that has one."""
    for folder in folders:
        path = folder.with_name(folder.name + SUFFIX)
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OscarZooError):  # not ours, or damaged: the page has none
                return ReportData.from_bytes(read_file(path, max_bytes=MAX_BYTES), what=str(path))
    return None


def _spectra(folders: Sequence[Path]) -> Spectra | None:
    """Eigenvalues behind the rotations, of the first folder that has both files with them."""
    for folder in folders:
        with contextlib.suppress(OscarZooError):
            found = check_one(folder)
            sides = (found.k, found.v) if isinstance(found, Verified) else (None, None)
            k, v = (None if side is None else _spectrum(side) for side in sides)
            if k is not None and v is not None:
                return Spectra(k=k, v=v)
    return None


def _spectrum(rotations: RotationSet) -> Spectrum | None:
    """Mean over heads; `None` without eigenvalues, and for a matrix without data behind it, whose
    eigenvalues are all the same."""
    layers = []
    for layer in rotations.layers:
        if layer.eigenvalues is None:
            return None
        values = np.atleast_2d(np.asarray(layer.eigenvalues, dtype=np.float64)).mean(axis=0)
        if not np.isfinite(values).all() or values.max() <= 0 or values.min() == values.max():
            return None
        layers.append(values.tolist())
    return Spectrum.of(rotations.objective[:60] or "covariance", layers)


@contextlib.contextmanager
def serving(folder: Path, port: int) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """A server of the files of one folder, on loopback only, and the address of its first page;
    port 0 takes a free one."""
    handler = partial(_Quiet, directory=str(folder))
    try:
        server = ThreadingHTTPServer((_LOOPBACK, port), handler)
    except OSError:
        check_port_free(_LOOPBACK, port, again=lambda: "oscar-zoo site --serve --port 0")
        raise
    with server:
        yield f"http://{_LOOPBACK}:{server.server_address[1]}/", server


class _Quiet(SimpleHTTPRequestHandler):
    server_version = "oscar-zoo"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def list_directory(self, path: object) -> None:  # type: ignore[override]
        self.send_error(404)
