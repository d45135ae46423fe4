"""Build the zoo's page: a static catalogue of the packaged artifacts and of hubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.site_charts import report_of, spectra_of
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.output_files import check_folder
from oscar_zoo.engines.sglang.capacity import Cache, caches
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.errors import ConflictError, OscarZooError, UsageError
from oscar_zoo.models.other_layers import OtherLayers
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import look
from oscar_zoo.registry.view import HubView
from oscar_zoo.serving.memory import Needs, needs_of_manifest, needs_of_recipe
from oscar_zoo.site.build import files_of
from oscar_zoo.site.exhibit import INDEX, Exhibit

MARK = ".oscar-zoo-site"
"""File in the root of a site that says that its pages may be replaced."""
_GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class SiteRequest:
    """What to build, and where.

    Attributes:
        output: folder of the site; it is made, or its pages are replaced where it holds a
            site already.
        hubs: hubs as people write them, shown beside what the package knows.
        offline: refuse hubs on the network.
    """

    output: Path = Path("site")
    hubs: Sequence[str] = ()
    offline: bool = False


@dataclass(frozen=True)
class BuiltSite:
    """A site that was written.

    Attributes:
        output: its folder.
        index: the page to open.
        artifacts: how many it shows.
        files: how many were written.
        nbytes: of all files.
        unreachable: what hubs said that did not answer.
    """

    output: Path
    index: Path
    artifacts: int
    files: int
    nbytes: int
    unreachable: tuple[OscarZooError, ...]


def build_site(
    output: str | Path = "site", *, hubs: str | Sequence[str] = (), offline: bool = False
) -> BuiltSite:
    """Build the zoo's page.

    Args:
        output: folder of the site; it is made, or its pages are replaced where it holds a
            site already.
        hubs: hubs as people write them, shown beside what the package knows.
        offline: refuse hubs on the network.

    Raises:
        ConflictError: the folder has something else in it.
        OscarZooError: the only hub did not answer.
        StorageError: the disk refused.
    """
    named = (hubs,) if isinstance(hubs, str) else tuple(hubs)
    return build(SiteRequest(Path(output), named, offline))


def build(request: SiteRequest) -> BuiltSite:
    """Build the site in a folder beside its place, and move it there as a whole; raises as
    `build_site`."""
    target = request.output.absolute()
    _check(target)
    catalog = Catalog.packaged()
    views: list[HubView] = []
    unreachable: list[OscarZooError] = []
    if request.hubs:
        views, unreachable = look(Sources(request.hubs, offline=request.offline).hubs)
    entries = collect(catalog, views)
    known = {entry.id.model.casefold() for entry in entries}
    recipes = [one for one in catalog.recipes() if one.name.casefold() not in known]
    exhibits = [_exhibit(entry, views) for entry in entries]
    files = nbytes = 0
    with durable.storage_errors(f"cannot write {target}"):
        durable.make_folders(target.parent)
        with durable.staged_folder(target.parent) as staged:
            for path, content in files_of(exhibits, recipes):
                place = staged / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
                files, nbytes = files + 1, nbytes + len(content)
            (staged / MARK).write_bytes(b"")
            _place(staged, target)
    return BuiltSite(target, target / INDEX, len(exhibits), files, nbytes, tuple(unreachable))


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


def _check(target: Path) -> None:
    """Refuse to replace what is no site, and a place that cannot be written."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UsageError(f"{target} is not a folder.", hint="name a new folder with --output")
    if target.is_dir() and any(target.iterdir()) and not (target / MARK).is_file():
        raise ConflictError(
            f"{target} has files that are no site of oscar-zoo.",
            hint="name a new or an empty folder with --output",
        )
    check_folder(target)
    check_folder(target.parent)


def _exhibit(entry: Entry, views: Sequence[HubView]) -> Exhibit:
    needs = _needs(entry)
    return Exhibit(
        entry=entry,
        caches=_caches(needs) if needs else {},
        weights=needs.weights.nbytes if needs and needs.weights else None,
        gpus=needs.gpus if needs and needs.gpus in _GPUS else 1,
        divided=needs is not None and needs.other != OtherLayers(),
        unknown=needs.unknown if needs else None,
        report=report_of(entry, views),
        spectra=spectra_of(entry, views),
    )


def _needs(entry: Entry) -> Needs | None:
    """What the model needs as far as recipe and manifest say it, the same on every machine."""
    if entry.recipe is not None:
        return needs_of_recipe(entry.recipe)
    return needs_of_manifest(entry.manifest) if entry.manifest else None


def _caches(needs: Needs) -> Mapping[int, tuple[Cache, ...]]:
    """The kinds of cache by number of GPUs; empty where the INT2 cache does not take the heads."""
    try:
        return {
            gpus: caches(needs.geometry, needs.serving, Layout(tp=gpus), needs.other)
            for gpus in _GPUS
        }
    except ValueError:
        return {}
