"""Fetch an artifact from the first hub that has it, verify it and put it into the store.

Every file is hashed when it arrives and again whenever it is used. Bytes that fail verification, or
that break a promise (see `trust`), never reach the store. An artifact that the project's lock names
and the store has costs no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.outcome import Outcome
from oscar_zoo.errors import (
    WITHOUT_OPTION,
    NetworkError,
    NotFoundError,
    OfflineError,
    OscarZooError,
)
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.base import Hub, Progress
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.pull_job import PullJob, PullResult
from oscar_zoo.registry.resolve import explained, pinned_missing
from oscar_zoo.registry.signatures import SignatureWish
from oscar_zoo.registry.store import Store, StoredArtifact
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.view import ResolvedArtifact

__all__ = ["PullResult", "plan", "pull", "verify_stored"]


def pull(
    reference: Reference,
    hubs: Hub | Sequence[Hub],
    store: Store,
    *,
    catalog: Catalog | None = None,
    trust: Trust | None = None,
    offline: bool = False,
    go_online: str = WITHOUT_OPTION,
    prefer_installed: bool = False,
    progress: Progress | None = None,
    signing: SignatureWish | None = None,
) -> PullResult:
    """Fetch, verify and store an artifact, or check the copy that is already there.

    Args:
        reference: what to pull; see `resolve`.
        hubs: where from, in order; the next one is asked after network trouble, or when one does
            not have it.
        store: where to.
        catalog: recipes and manifests; default the packaged ones.
        trust: what was seen before and how strict to be; default the known artifacts of this user.
        offline: take the copy in the store; only hubs in folders may be in `hubs`.
        go_online: how to end offline mode, for errors.
        prefer_installed: take a copy in the store, if there is one, without asking whether a hub
            has another.
        progress: told about bytes fetched, from several threads.
        signing: whether a signature is required, and keys that are known.

    Raises:
        ArtifactSignatureError: there is no valid signature, and it is required.
        NotFoundError, AmbiguousName: see `resolve`.
        NetworkError: no hub answered, or `offline` and not here.
        AccessError: a hub refused.
        NotLocked: `trust.locked`, and the lock does not have it.
        DigestMismatchError: the hub's bytes differ from its listing, or from what was promised
            before.
        MalformedFile: the hub lists more bytes than any artifact has, or its index or manifest is
            broken.
        VerificationFailed: the bytes must not be used; `error.outcome` says why.
        StorageError: the disk refused.
    """
    job = PullJob(reference, hubs, store, catalog, trust, progress, signing)
    here = job.installed(offline or prefer_installed)
    if here is not None:
        job.remember_copy(here.artifact.record)
        status = status_warnings(
            here.artifact.record, job.catalog, ask=not (offline or prefer_installed)
        )
        return replace(here, warnings=(*status, *here.warnings))
    store.check_owner()  # before a hub is asked
    with durable.held(durable.STORE, shared=True, timeout=30, root=store.root):
        try:
            if offline and not job.hubs:
                raise OfflineError.for_name(str(job.reference), go_online=go_online)
            result, notes = job.ask(job.obtain)
            if job.pin is not None:  # a locked commit does not say what happened to it later
                status = status_warnings(result.artifact.record, job.catalog, ask=True)
                told = (*status, *(warning for warning in result.warnings if warning not in status))
                result = replace(result, warnings=told)
        except (NetworkError, NotFoundError) as error:
            if job.refused is not None:
                what, signature = job.refused
                signature.require(what)
            raise _explained(job, error, offline=offline, go_online=go_online) from error.__cause__
    return replace(result, notes=notes)


def plan(
    reference: Reference,
    hubs: Hub | Sequence[Hub],
    store: Store,
    *,
    catalog: Catalog | None = None,
    trust: Trust | None = None,
    signing: SignatureWish | None = None,
    offline: bool = False,
    go_online: str = WITHOUT_OPTION,
) -> ResolvedArtifact | PullResult:
    """What `pull` would do: the installed copy it would take, or the offer it would fetch. Writes
    nothing; arguments and errors as there."""
    job = PullJob(reference, hubs, store, catalog, trust, None, signing)
    here = job.installed(offline)
    if here is not None:
        return here
    try:
        if offline and not job.hubs:
            raise OfflineError.for_name(str(job.reference), go_online=go_online)
        return job.ask(job.offer)[0].resolved
    except (NetworkError, NotFoundError) as error:
        raise _explained(job, error, offline=offline, go_online=go_online) from error.__cause__


def _explained(
    job: PullJob, error: OscarZooError, *, offline: bool, go_online: str
) -> OscarZooError:
    """`error` of hubs that could not help, with what was looked for and what the user can do."""
    lock, store = job.trust.lock, job.store
    if job.pin is not None and lock is not None:
        if offline and not isinstance(error, NetworkError):
            error = OfflineError.for_name(str(job.reference), go_online=go_online)
        return pinned_missing(error, job.reference, job.pin, lock.path, store, job.hubs)
    return explained(
        error,
        job.reference,
        store,
        job.hubs,
        job.catalog,
        offline=offline,
        go_online=go_online,
    )


def verify_stored(artifact: StoredArtifact, catalog: Catalog | None = None) -> Outcome:
    """Verify an entry that `Store.open` returned, with the geometry the zoo knows for its model."""
    from oscar_zoo.artifact.verify import verify_files

    recipe = (catalog or Catalog.packaged()).recipe(artifact.record.id.model)
    return verify_files(
        artifact.payload,
        manifest=artifact.manifest,
        expected=artifact.record.files,
        geometry=recipe.geometry if recipe else None,
        name_hint=str(artifact.record.id),
    )
