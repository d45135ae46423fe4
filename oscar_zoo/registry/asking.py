"""Ask hubs in order, and say what the user can do where none could help.

The next hub is asked after network trouble or a plain "not here", never after anything else:
another hub's answer would hide a wrong digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

from oscar_zoo import errors, paths
from oscar_zoo.next_step import Compute
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.known_names import close_names, known_versions, knows
from oscar_zoo.registry.pins import Pin, same_hub
from oscar_zoo.registry.store import Record

if TYPE_CHECKING:
    from oscar_zoo.registry.fetch import PullJob

T = TypeVar("T")
_SHOWN = 3
"""How many installed names an error lists."""


def first_answer(
    hubs: Sequence[Hub], ask: Callable[[Hub], T], *, name: str
) -> tuple[T, tuple[str, ...]]:
    if not hubs:
        raise errors.UsageError(
            "there is no hub to ask.", hint="name one with --hub, or in config.toml"
        )
    troubles: list[tuple[Hub, errors.OscarZooError]] = []
    for hub in hubs:
        try:
            answer = ask(hub)
        except (errors.NetworkError, errors.NotFoundError) as error:
            troubles.append((hub, error))
        else:
            return answer, tuple(
                e.message for _, e in troubles if isinstance(e, errors.NetworkError)
            )
    raise _nobody(name, troubles)


def _own_zoo() -> str:
    """Name of the hub that everybody has: a folder of this user, of which errors need not speak."""
    return f"file:{paths.default_zoo_dir()}"


def _nobody(
    name: str, troubles: Sequence[tuple[Hub, errors.OscarZooError]]
) -> errors.OscarZooError:
    silent = [
        error.message.rstrip(".") for _, error in troubles if isinstance(error, errors.NetworkError)
    ]
    close = [error for _, error in troubles if error.suggestions]
    if silent:
        error: errors.OscarZooError = troubles[0][1]
        if len(troubles) > 1:
            answered = [hub for hub, e in troubles if not isinstance(e, errors.NetworkError)]
            silent += [f"{hub.title} has no {name}" for hub in answered if hub.name != _own_zoo()]
            hint = "here already: oscar-zoo list --installed"
            error = errors.HubUnreachable("; ".join(silent) + ".", hint=hint)
        # Whether another name was meant needs no hub.
        error.suggestions = error.suggestions or (
            close[0].suggestions if close else close_names(name)
        )
        return error
    if len(troubles) == 1:
        return troubles[0][1]
    usual = (_own_zoo(), *address.PUBLIC)
    for hub, missing in troubles:
        if (
            isinstance(missing, errors.PathNotFound | errors.RepositoryNotFound)
            and hub.name not in usual
        ):
            return missing  # the hub itself is missing, so the name may be right
    if close:
        return close[0]
    asked = ", ".join(hub.title for hub, _ in troubles)
    options = "".join(f" --hub {quote(hub.name)}" for hub, _ in troubles)
    if {hub.name for hub, _ in troubles} <= set(address.Sources().read):
        options = ""  # it lists them anyway
    return errors.ArtifactNotFound(
        f"{name} is on none of the hubs asked: {asked}.",
        hint=f"see what they have: oscar-zoo list{options}",
        next_step=Compute("MODEL"),
    )


def explained(error: errors.OscarZooError, job: PullJob) -> errors.OscarZooError:
    """`error` of hubs that could not help, with what was looked for and what the user can do."""
    pin, lock, copy = job.pin, job.trust.lock, job.copy()
    if copy is not None and (damaged := _damaged(error, job, copy)):
        return damaged
    if pin is not None and lock is not None:
        return _pinned_missing(error, job, pin, lock.path)
    if copy is None:
        return _missing(error, job)
    if isinstance(error, errors.NetworkError):
        again = f"oscar-zoo pull {job.reference} --offline"
        error.advise(f"a copy of {copy.fetched[:10]} is here; to use it: {again}")
    return error


def _damaged(
    error: errors.OscarZooError, job: PullJob, record: Record
) -> errors.IntegrityError | None:
    """What is wrong with a copy in the store, and what the hubs said."""
    try:
        job.store.open(record.digest, record.id)
    except errors.IntegrityError as damage:
        said = f"it could not be fetched again: {error.message}"
        if not any(same_hub(record.source, hub.name) for hub in job.hubs):
            place = f"fetch it again from where it came from: {record.fetch_again}"
            said = f"{place} ({said.rstrip('.')})"
        damage.advise(said)
        return damage
    return None


def _pinned_missing(
    error: errors.OscarZooError, job: PullJob, pin: Pin, lock: Path
) -> errors.OscarZooError:
    """`error` about a version that a lock pins, with where it was and which others are here."""
    if job.offline and not isinstance(error, errors.NetworkError):
        error = errors.OfflineError.for_name(str(job.reference), go_online=job.go_online)
    model, name = pin.artifact_id.model.casefold(), pin.artifact_id.reference
    others = [one.id for one in job.store.installed() if one.id.key != pin.artifact_id.key]
    here = sorted(one.reference for one in others if one.model.casefold() == model)
    _say(
        error,
        f"{lock} pins {job.reference} to {name}, which is not on this machine and could not be"
        f" fetched: {error.message}",
    )
    fetch = f"fetch it from where it was: oscar-zoo pull {name} --hub {quote(pin.hub)}"
    error.advise(f"{fetch}; or name the version that is here: {here[0]}" if here else fetch)
    return error


def _missing(error: errors.OscarZooError, job: PullJob) -> errors.OscarZooError:
    """`error` about an artifact that is not here, with what is installed."""
    reference = job.reference
    recipe = job.catalog.recipe(reference.name)
    if job.offline and recipe and all(hub.name == _own_zoo() for hub in job.hubs):
        if not isinstance(error, errors.OfflineError):
            error = errors.OfflineError.for_name(str(reference), go_online=job.go_online)
    elif not isinstance(error, errors.NetworkError):
        return error
    there = sorted({record.id.reference for record in job.store.installed()})
    more = f", ... ({len(there)} in all)" if len(there) > _SHOWN else ""
    here = f"installed: {', '.join(there[:_SHOWN])}{more}" if there else "no rotation is here yet"
    if recipe and recipe.name not in {version.model for version in known_versions()}:
        here = f"no published rotation of {recipe.name} is known, so one must be computed; {here}"
    if job.offline:
        error.advice = "; ".join(filter(None, (error.advice, here)))
        return error
    if isinstance(error, errors.NetworkError):
        error.said = error.message
    unknown = errors.HubUnreachable.for_unknown(str(reference), [error.message], error.suggestions)
    missing = f"{reference} is not on this machine and could not be fetched: {error.message}"
    _say(error, missing if knows(reference.name) else unknown.message)
    error.advice = f"{unknown.advice}; {here}"
    return error


def _say(error: errors.OscarZooError, message: str) -> None:
    error.message = message
    error.args = (message,)
