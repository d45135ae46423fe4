"""A reference -> one artifact of the first hub that has it, or an error that says what to do.

Names are compared without case, in this order: exact id `<Model>/<tag>`, model name or hub id (the
organisation may be dropped where that is unique), alias. A name that means several versions is an
error that lists them, never a guess; deprecated versions count only where none is active, and
withdrawn (yanked) ones are found by digest only. The next hub is asked after network trouble or a
plain "not here", never after anything else: another hub's answer would hide a wrong digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

from oscar_zoo import paths
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import (
    AmbiguousName,
    ArtifactNotFound,
    HubUnreachable,
    IntegrityError,
    NetworkError,
    NotFoundError,
    OfflineError,
    OscarZooError,
    PathNotFound,
    RepositoryNotFound,
    UsageError,
)
from oscar_zoo.next_step import Compute, ListNames
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.known_names import close_names, knows
from oscar_zoo.registry.pins import Pin, same_hub
from oscar_zoo.registry.store import Record, Store, find_installed
from oscar_zoo.registry.view import HubView, ResolvedArtifact, status_sentence


def every_version(hubs: Iterable[Hub]) -> list[Reference]:
    """The full name of every version of every hub, each once, sorted, without the withdrawn
    ones."""
    found: dict[str, Reference] = {}
    for hub in hubs:
        view = HubView.open(hub)
        for artifact in hub.artifacts():
            if view.status(artifact).state != "yanked":
                found.setdefault(artifact.key, Reference(artifact.model, artifact.tag))
    return [found[key] for key in sorted(found)]


def find(reference: Reference, view: HubView) -> ResolvedArtifact:
    """The artifact that `reference` means in `view`."""
    on_hub = view.hub.artifacts()
    exact = [a for a in on_hub if a.key == reference.name.casefold()]
    versions = exact if exact and not reference.tag else _versions(reference.name, on_hub, view)
    if not versions:
        raise _not_found(reference, on_hub, view)
    if reference.tag is not None:
        tagged = [a for a in versions if a.tag.casefold() == reference.tag.casefold()]
        if not tagged:
            raise ArtifactNotFound(
                f"{versions[0].model} has no version {reference.tag} on {view.hub.title}.",
                hint=f"it has {', '.join(a.reference for a in versions)}",
            )
        versions = tagged
    if reference.digest is not None:
        return _with_digest(reference, reference.digest, versions, view)
    return view.offer(_choose(reference, versions, view))


def _versions(name: str, on_hub: Sequence[ArtifactId], view: HubView) -> list[ArtifactId]:
    recipe = view.catalog.recipe(name)
    if recipe is None:
        aliased = view.aliased(name)
        if aliased:
            return [a for a in on_hub if a.key in aliased]
    folder = recipe.name if recipe else name.rsplit("/", 1)[-1]
    found = [a for a in on_hub if a.model.casefold() == folder.casefold()]
    if recipe is not None or "/" not in name:
        return found
    # An organisation the zoo does not know: only what the hub's own index or manifests say is that
    # model.
    if view.catalog.recipe(folder) is not None:
        return []
    return [a for a in found if (_base_model(a, view) or "").casefold() == name.casefold()]


def _base_model(artifact: ArtifactId, view: HubView) -> str | None:
    entry = view.index.entry(artifact)
    if entry is not None and entry.model is not None:
        return entry.model
    manifest = view.offer(artifact).manifest
    return manifest.model.id if manifest is not None else None


def _with_digest(
    reference: Reference, prefix: str, versions: Iterable[ArtifactId], view: HubView
) -> ResolvedArtifact:
    """The one version whose digest starts with `prefix`; withdrawn ones too, with their warning."""
    offers = [view.offer(artifact) for artifact in versions]
    found = [o for o in offers if (o.digest or o.expected_digest or "").startswith(prefix)]
    if not found:
        offered = ", ".join(f"{o.id.reference}@{o.digest}" for o in offers)
        raise ArtifactNotFound(
            f"nothing called {reference} is on {view.hub.title}.", hint=f"it has {offered}"
        )
    if len(found) > 1:
        raise AmbiguousName.for_name(str(reference), [o.id.reference for o in found])
    return found[0]


def _choose(reference: Reference, versions: list[ArtifactId], view: HubView) -> ArtifactId:
    usable = [a for a in versions if view.status(a).state != "yanked"]
    if not usable:
        raise _withdrawn(reference, versions, view)
    # A deprecated version is taken only when no version is active.
    usable = [a for a in usable if view.status(a).state == "active"] or usable
    if len(usable) == 1:
        return usable[0]
    recipe = view.catalog.recipe(reference.name)
    default = recipe.default_tag.casefold() if recipe and recipe.default_tag else None
    chosen = [a for a in usable if a.tag.casefold() == default]
    if len(chosen) != 1:  # none is the default, or a hub in a folder has two that differ in case
        raise AmbiguousName.for_name(str(reference), [a.reference for a in usable])
    return chosen[0]


def _withdrawn(
    reference: Reference, versions: Sequence[ArtifactId], view: HubView
) -> ArtifactNotFound:
    first = versions[0]
    if len(versions) == 1:
        what = status_sentence(first, view.status(first))
    else:
        what = f"every version of {reference} on {view.hub.title} was withdrawn"
    entry = view.index.entry(first)
    digest = entry.digest if entry else "sha256:..."
    return ArtifactNotFound(
        f"{what}.", hint=f"to use it anyway, name its digest: {first.model}@{digest}"
    )


def _not_found(
    reference: Reference, on_hub: Sequence[ArtifactId], view: HubView
) -> ArtifactNotFound:
    recipe = view.catalog.recipe(reference.name)
    if recipe is None:
        models = {a.model for a in on_hub} | {
            alias for e in view.index.artifacts for alias in e.aliases
        }
        error = ArtifactNotFound.for_name(
            str(reference), view.catalog.close_matches(reference.name, models)
        )
        error.next_step = ListNames(None if view.hub.name in address.load().read else view.hub.name)
        return error
    elsewhere = sorted(
        f"{scheme}:{place.repo}"
        for m in view.catalog.manifests(recipe.name)
        if m.registry
        for scheme, place in m.registry.hubs.items()
    )
    return ArtifactNotFound(
        f"{recipe.name} is not on {view.hub.title}.",
        hint=f"another hub has it: --hub {elsewhere[0]}" if elsewhere else None,
        next_step=ListNames(view.hub.name),
    )


if TYPE_CHECKING:
    from oscar_zoo.registry.fetch import PullJob

T = TypeVar("T")


def first_answer(
    hubs: Sequence[Hub], ask: Callable[[Hub], T], *, name: str
) -> tuple[T, tuple[str, ...]]:
    """The first answer to `ask`, and a sentence for every hub that did not answer before."""
    if not hubs:
        raise UsageError("there is no hub to ask.", hint="name one with --hub, or in config.toml")
    troubles: list[tuple[Hub, OscarZooError]] = []
    for hub in hubs:
        try:
            return ask(hub), tuple(
                error.message for _, error in troubles if isinstance(error, NetworkError)
            )
        except (NetworkError, NotFoundError) as error:
            troubles.append((hub, error))
    raise _suggesting(_nobody(name, troubles), name, troubles)


def own_zoo() -> str:
    """Name of the hub that everybody has: a folder of this user, of which errors need not speak."""
    return f"file:{paths.default_zoo_dir()}"


def _nobody(name: str, troubles: Sequence[tuple[Hub, OscarZooError]]) -> OscarZooError:
    """The error for a search without an answer."""
    silent = [(hub, error) for hub, error in troubles if isinstance(error, NetworkError)]
    if len(troubles) == 1:
        return troubles[0][1]
    if silent:
        facts = _silence(silent)
        answered = [hub for hub, error in troubles if not isinstance(error, NetworkError)]
        facts += [f"{hub.title} has no {name}" for hub in answered if hub.name != own_zoo()]
        return HubUnreachable(
            "; ".join(facts) + ".", hint="here already: oscar-zoo list --installed"
        )
    usual = (own_zoo(), *address.PUBLIC)
    for hub, error in troubles:
        if isinstance(error, PathNotFound | RepositoryNotFound) and hub.name not in usual:
            return error  # the hub itself is missing, so the name may be right
    close = [error for _, error in troubles if error.suggestions]
    if close:
        return close[0]
    asked = ", ".join(hub.title for hub, _ in troubles)
    return ArtifactNotFound(
        f"{name} is on none of the hubs asked: {asked}.",
        hint=f"see what they have: oscar-zoo list{_as_options(hub for hub, _ in troubles)}",
        next_step=Compute("MODEL", "oscar-zoo pull MODEL --compute"),
    )


def _silence(silent: Sequence[tuple[Hub, OscarZooError]]) -> list[str]:
    """What is said of hubs that did not answer; those with one reason share a clause."""
    of_reason: dict[str, list[str]] = {}
    for hub, error in silent:
        text = error.message.rstrip(".")
        title = hub.title if text.startswith(f"{hub.title} ") else ""
        of_reason.setdefault(text.removeprefix(title), []).append(title)
    return [
        " and ".join(titles) + (reason if len(titles) == 1 else reason.replace(": its ", ": the "))
        for reason, titles in of_reason.items()
    ]


def _as_options(hubs: Iterable[Hub]) -> str:
    """`hubs` as options of a command; nothing where it asks them anyway."""
    names = [hub.name for hub in hubs]
    if set(names) <= set(address.load().read):
        return ""
    return "".join(f" --hub {quote(name)}" for name in names)


def _suggesting(
    error: OscarZooError, name: str, troubles: Sequence[tuple[Hub, OscarZooError]]
) -> OscarZooError:
    """`error`, asking first whether another name was meant where hubs did not answer: that needs no
    hub."""
    if isinstance(error, NetworkError) and not error.suggestions:
        known = next((other.suggestions for _, other in troubles if other.suggestions), ())
        error.suggestions = known or close_names(name)
    return error


_SHOWN = 3
"""How many installed names an error lists."""


def explained(error: OscarZooError, job: PullJob) -> OscarZooError:
    """`error` of hubs that could not help, with what was looked for and what the user can do: use
    the copy in the store, or fetch it again."""
    if job.pin is not None and job.trust.lock is not None:
        return _pinned_missing(error, job, job.pin, job.trust.lock.path)
    record = find_installed(job.reference, job.store, job.catalog)
    if record is None:
        return _missing(error, job)
    if (damaged := _damaged(error, job, record)) is not None:
        return damaged
    if isinstance(error, NetworkError):
        again = f"oscar-zoo pull {job.reference} --offline"
        error.advise(f"a copy of {record.fetched[:10]} is here; to use it: {again}")
    return error


def _pinned_missing(error: OscarZooError, job: PullJob, pin: Pin, lock: Path) -> OscarZooError:
    """`error` about a version that a lock pins. Its message begins with the lock and the version,
    and its advice says where the version was and which other versions are here."""
    if job.offline and not isinstance(error, NetworkError):
        error = OfflineError.for_name(str(job.reference), go_online=job.go_online)
    others = []
    for record in job.store.installed():
        if record.id.key == pin.artifact_id.key:
            same = pin.same_bytes(record.digest, record.manifest_sha256)
            if same and (damaged := _damaged(error, job, record)) is not None:
                return damaged
        elif record.id.model.casefold() == pin.artifact_id.model.casefold():
            others.append(record.id.reference)
    name = pin.artifact_id.reference
    error.message = (
        f"{lock} pins {job.reference} to {name}, which is not on this machine and could not be"
        f" fetched: {error.message}"
    )
    error.args = (error.message,)
    fetch = f"fetch it from where it was: oscar-zoo pull {name} --hub {quote(pin.hub)}"
    use = f"; or name the version that is here: {sorted(others)[0]}" if others else ""
    error.advise(f"{fetch}{use}")
    return error


def _damaged(error: OscarZooError, job: PullJob, record: Record) -> IntegrityError | None:
    """What is wrong with a copy in the store, with the hub that it came from where that was not
    asked, and what the others said."""
    try:
        job.store.open(record.digest, record.id)
    except IntegrityError as damage:
        said = f"it could not be fetched again: {error.message}"
        if not any(same_hub(record.source, hub.name) for hub in job.hubs):
            place = f"fetch it again from where it came from: {record.fetch_again}"
            said = f"{place} ({said.rstrip('.')})"
        damage.advise(said)
        return damage
    return None


def _missing(error: OscarZooError, job: PullJob) -> OscarZooError:
    """`error` about an artifact that is not here. Its message begins with that, and its advice
    lists what is installed."""
    reference = job.reference
    known = job.catalog.recipe(reference.name) is not None
    if job.offline and known and all(hub.name == own_zoo() for hub in job.hubs):
        if not isinstance(error, OfflineError):
            error = OfflineError.for_name(str(reference), go_online=job.go_online)
    elif not isinstance(error, NetworkError):
        return error
    here = _installed(job.store)
    if job.offline:
        error.advice = "; ".join(filter(None, (error.advice, here)))
        return error
    if isinstance(error, NetworkError):
        error.said = error.message
    unknown = HubUnreachable.for_unknown(str(reference), [error.message], error.suggestions)
    if knows(reference.name):
        error.message = (
            f"{reference} is not on this machine and could not be fetched: {error.message}"
        )
    else:
        error.message = unknown.message
    error.args = (error.message,)
    error.advice = f"{unknown.advice}; {here}"
    return error


def _installed(store: Store) -> str:
    there = sorted({record.id.reference for record in store.installed()})
    if not there:
        return "nothing is installed yet"
    more = f", ... ({len(there)} in all)" if len(there) > _SHOWN else ""
    return f"installed: {', '.join(there[:_SHOWN])}{more}"
