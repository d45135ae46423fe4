"""Look at several hubs at once, and at what is known about the artifact that a name or a folder
means. Each hub has little time, and a hub that fails does not stop the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference, path_text
from oscar_zoo.observer import SILENT
from oscar_zoo.registry import known_names, score_file
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect, entry_of
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import Hub, in_parallel, within
from oscar_zoo.registry.index import ACCEPTED, Summary
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.targets import ModelTarget, NameTarget, PathTarget, Target, looking_up
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.view import HubView

PATIENCE = 6.0
"""Seconds that looking at one hub may take."""


def look(hubs: Sequence[Hub]) -> tuple[list[HubView], list[errors.OscarZooError]]:
    """The index and listing of each hub that answered, in order, and what the others said."""
    if len(hubs) == 1:
        return [_load(hubs[0])], []
    answers = in_parallel([partial(_attempt, hub) for hub in hubs], workers=len(hubs) or 1)
    views = [answer for answer in answers if isinstance(answer, HubView)]
    return views, [answer for answer in answers if isinstance(answer, errors.OscarZooError)]


def unknown_name(
    name: str, unreachable: Sequence[errors.OscarZooError], close: Sequence[str]
) -> errors.OscarZooError:
    """The error for a name that no hub that answered has; `close` are names like it, best first."""
    silent = [error.message for error in unreachable if isinstance(error, errors.NetworkError)]
    if silent:
        return errors.HubUnreachable.for_unknown(name, silent, close)
    error, kin = errors.ArtifactNotFound.for_name(name, close), Catalog.packaged().kin(name)
    if kin is not None and not {*"/:@"} & {*name}:
        full = f"{kin.hf_id.partition('/')[0]}/{name}"
        pull = f"if Hugging Face has {full}: oscar-zoo pull {full} --compute"
        error.next_step = None
        error.advice = f"what works for a model like it: oscar-zoo info {kin.name}; {pull}"
    return error


def _attempt(hub: Hub) -> HubView | errors.OscarZooError:
    late = partial(errors.HubTimeout.for_hub, hub.title, f"did not answer within {PATIENCE:.0f} s")
    try:
        return within(PATIENCE, partial(_load, hub), error=late)
    except (errors.NetworkError, errors.AccessError, errors.NotFoundError) as error:
        return error


def _load(hub: Hub) -> HubView:
    view = HubView.open(hub, Catalog.packaged(), trust=Trust())
    hub.artifacts()
    return view


def known_entries(
    targets: Sequence[Target], sources: Sources
) -> tuple[list[Entry], list[errors.OscarZooError]]:
    """What each target means: the artifact in a folder, or the default or only version of a name.
    The package and the hubs are asked, then the local store; no hub is asked for folders."""
    views: list[HubView] = []
    unreachable: list[errors.OscarZooError] = []
    if not all(isinstance(target, PathTarget) for target in targets):
        views, unreachable = look(sources.hubs)
    entries = []
    for target in targets:
        if isinstance(target, PathTarget):
            entries.append(_in_folder(target))
        else:
            with looking_up(target, SILENT):
                entries.append(_named(target, views, unreachable))
    return entries, unreachable


def served_entry(reference: Reference) -> Entry | None:
    """The version that `serve` would take, as far as this machine knows; `None` where it knows
    none, or several of which none is the default."""
    with contextlib.suppress(errors.AmbiguousName, errors.ArtifactNotFound):
        views, _ = look(Sources(offline=True).hubs)
        return _stored(reference) or _named(NameTarget(str(reference), reference), views, ())
    return None


def _named(
    target: NameTarget | ModelTarget,
    views: Sequence[HubView],
    unreachable: Sequence[errors.OscarZooError],
) -> Entry:
    catalog = Catalog.packaged()
    reference = known_names.expand(target.reference, views)
    recipe = catalog.recipe(reference.name)
    model = recipe.name if recipe else reference.name.rpartition("/")[2]
    versions = collect(catalog, views, model)
    found = [one for one in versions if _means(reference, one)]
    default = recipe.default_tag if recipe else None
    if len(found) > 1 and reference.tag is None and reference.digest is None:
        found = [one for one in found if one.id.tag == default] or found
    if len(found) > 1:
        raise errors.AmbiguousName.for_name(str(target), [one.id.reference for one in found])
    entry = found[0] if found else _stored(reference)
    if entry is None:
        raise _unknown(target, versions, views, unreachable)
    return entry


def _stored(reference: Reference) -> Entry | None:
    """A copy in the local store of what no hub that was asked has."""
    store = Store()
    record = known_names.find_stored(reference, store)
    copy = store.intact(record)
    if record is None or copy is None:
        return None
    accepted = tuple(what for what in ACCEPTED if what in record.accepted)
    if copy.manifest is not None:
        entry = entry_of(copy.manifest)
        measured = {"measured": entry.summary.measured or record.measured}
        summary = entry.summary.model_copy(update=measured)
        return replace(entry, summary=summary, accepted=accepted)
    return Entry(
        id=record.id,
        recipe=Catalog.packaged().recipe(record.id.model),
        summary=Summary(measured=record.measured),
        digest=record.digest,
        payload_bytes=sum(file.size for file in record.files),
        accepted=accepted,
    )


def _unknown(
    target: NameTarget | ModelTarget,
    versions: Sequence[Entry],
    views: Sequence[HubView],
    unreachable: Sequence[errors.OscarZooError],
) -> errors.OscarZooError:
    catalog, name = Catalog.packaged(), target.reference.name
    if versions:
        return errors.ArtifactNotFound.among(str(target), [one.id.reference for one in versions])
    recipe = catalog.recipe(name)
    if recipe is not None:
        return errors.ArtifactNotFound.for_model(recipe.name)
    models = {artifact.model for view in views for artifact in view.hub.artifacts()}
    return unknown_name(str(target), unreachable, catalog.close_matches(name, models))


def _in_folder(target: PathTarget) -> Entry:
    path = target.path / FILE_NAME
    if target.path.is_file():
        folder = target.path.parent
        hint = f"to check it: oscar-zoo verify {quote(path_text(target.path))}"
        if (folder / FILE_NAME).is_file():
            hint = f"name the folder: {'./' if folder == Path() else quote(path_text(folder))}"
        raise errors.UsageError(
            f"{target} is a file; this takes the folder of an artifact.", hint=hint
        )
    if not target.path.is_dir():
        raise errors.PathNotFound.for_path(target, "folder of an artifact")
    if not path.is_file():
        where = "name a folder that compute, fit or pull --output wrote"
        raise errors.PathNotFound(
            f"{target} has no {FILE_NAME}, so nothing is known of it.", hint=where
        )
    data = read_file(path, max_bytes=strict_json.MAX_BYTES)
    manifest = Manifest.from_bytes(data, what=str(path))
    beside = score_file.read(score_file.in_folder(target.path))
    same = beside is not None and beside.digest == manifest.digest
    return entry_of(manifest, beside.scores if beside and same else ())


def _means(reference: Reference, entry: Entry) -> bool:
    tagged = reference.tag is None or entry.id.tag.casefold() == reference.tag.casefold()
    return tagged and (entry.digest or "").startswith(reference.digest or "")
