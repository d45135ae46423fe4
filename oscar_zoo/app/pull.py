"""Fetch artifacts by name, verify them and keep them in the local store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from oscar_zoo.app.artifacts import Artifact, pulled_artifact
from oscar_zoo.app.compute_plan import plan_instead
from oscar_zoo.app.compute_wish import model_to_compute, tell_of_folder
from oscar_zoo.app.pull_request import (
    Named,
    Offered,
    Pulled,
    PullReport,
    PullRequest,
    Result,
    check_request,
    trust_of,
)
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.output_files import check_folder
from oscar_zoo.errors import NotLocked, OscarZooError
from oscar_zoo.observer import SILENT, Observer, Silent
from oscar_zoo.registry import pull as registry
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import Progress
from oscar_zoo.registry.hubs.threads import in_parallel
from oscar_zoo.registry.pull import PullResult
from oscar_zoo.registry.resolve import every_version
from oscar_zoo.registry.signatures import NOT_SIGNED, SignatureWish
from oscar_zoo.registry.store import Store, export
from oscar_zoo.registry.targets import (
    ModelChoice,
    ModelTarget,
    NameTarget,
    check_made_for,
    mention_namesake,
    parse_named,
)
from oscar_zoo.registry.trust import Trust
from oscar_zoo.serving.prepared import check_used

T = TypeVar("T")
PARALLEL_ARTIFACTS = 4


def pull_all(request: PullRequest, observer: Observer = SILENT) -> PullReport:
    """Fetch, verify and keep every target, several at a time.

    What nobody has is computed, one model after the other, if `request.wish` says so; otherwise the
    error names computing as the next step. An error of one target is its result.
    """
    check_request(request)
    _check_output(request)
    trust = trust_of(request)
    lock = trust.lock.path if trust.lock and not trust.lock.path.exists() else None
    wanted: Sequence[Named] = request.targets
    if request.everything:
        wanted = [NameTarget(str(name), name) for name in every_version(request.sources.hubs)]
    once: dict[Reference, Named] = {}
    for target in wanted:
        once.setdefault(target.reference, target)
    targets = tuple(once.values())
    one = partial(_offer if request.dry_run else _pull, request, trust, Store())
    calls = []
    for target in targets:
        label = f"{target.reference.name.rsplit('/', 1)[-1]} " if len(targets) > 1 else ""
        fetched = partial(_fetched, observer, label)
        calls.append(partial(_attempt, partial(one, target, fetched)))
    results = in_parallel(calls, workers=PARALLEL_ARTIFACTS)
    results = [
        _computed(request, trust, target, result, observer)
        if isinstance(result, OscarZooError)
        else result
        for target, result in zip(targets, results, strict=True)
    ]
    for target, result in zip(targets, results, strict=True):
        if isinstance(result, NotLocked):
            again = partial(request.command_line, target.text, **{"dry-run": False})
            result.propose(again(), again(lock=True))
        place = target.model_namesake if isinstance(target, NameTarget) else None
        error = result if isinstance(result, OscarZooError) else None
        mention_namesake(place, error, observer)
    observer.begin((), timed=False)
    return PullReport(tuple(results), lock if lock is not None and lock.exists() else None)


def pull(
    name: str,
    *,
    hubs: str | Sequence[str] | None = None,
    output: str | Path | None = None,
    lock: str | Path | None = None,
    locked: bool = False,
    accept_new_digest: bool = False,
    offline: bool = False,
    require_signature: bool = False,
    keys: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> Artifact:
    """Fetch, verify and keep an artifact, or check the copy that is here.

    Args:
        name: `NAME`, `NAME:TAG`, `NAME@sha256:PREFIX`; a Hugging Face id works too.
        hubs: asked in order; default `OSCAR_ZOO_HUB`, `config.toml`, else the zoo of this user and
            the public ones.
        output: also copy the files to `<output>/<Model>/<tag>`.
        lock: an `oscar-zoo.lock` to hold the artifact to, and to pin it in.
        locked: take only what `lock` has; never write it.
        accept_new_digest: take bytes that differ from those seen before, and pin them.
        offline: ask no hub.
        require_signature: refuse an artifact without a valid signature of a known key.
        keys: PEM files of public keys that are known besides the hub's and those of the package.
        progress: called with file, bytes so far and bytes in total, from several threads.

    Raises:
        NotFoundError: nobody has it.
        AmbiguousName: `name` means several versions.
        NetworkError: no hub answered.
        AccessError: a hub wants a login or refuses.
        IntegrityError: bytes are not what they must be; nothing was kept.
        OutputExists: `output` holds other content.
        NotLocked: `locked`, and `lock` does not have it.
    """
    request = PullRequest(
        (parse_named(name),),
        Sources(hubs, offline=offline),
        output=None if output is None else Path(output),
        lock=False if lock is None else Path(lock),
        locked=locked,
        accept_new_digest=accept_new_digest,
        signing=SignatureWish(require_signature, tuple(map(Path, keys))),
    )
    result = pull_all(request, _Progress(progress)).results[0]
    if isinstance(result, OscarZooError):
        raise result
    assert isinstance(result, Pulled), "nothing was asked to be planned"
    return pulled_artifact(result.result, result.output)


class _Progress(Silent):
    """Tells a callback of a Python caller about bytes."""

    def __init__(self, callback: Progress | None) -> None:
        self._callback = callback

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None:
        """See `Observer`."""
        if self._callback is not None and unit == "bytes":
            self._callback(label, done, total)


def _fetched(observer: Observer, label: str, file: str, done: int, total: int) -> None:
    observer.advance(label + file, done, total, "bytes")


def _attempt(call: Callable[[], T]) -> T | OscarZooError:
    try:
        return call()
    except OscarZooError as error:
        return error


def _pull(
    request: PullRequest, trust: Trust, store: Store, target: Named, fetched: Progress
) -> Result:
    result = registry.pull(
        target.reference,
        request.sources.hubs,
        store,
        trust=trust,
        offline=request.sources.offline,
        go_online=request.sources.go_online,
        progress=fetched,
        signing=request.signing,
    )
    if isinstance(target, ModelTarget):
        check_made_for(target.choice, result.artifact.manifest)
    return Pulled(result, _copy(result, request))


def _check_output(request: PullRequest) -> None:
    """Refuse an output folder that cannot be written; one with files may have what is wanted."""
    output = request.output
    if output is None or request.dry_run or (output.is_dir() and any(output.iterdir())):
        return
    check_folder(output)


def _copy(result: PullResult, request: PullRequest) -> Path | None:
    if request.output is None:
        return None
    return export(result.artifact, request.output, replace=request.force)


def _offer(
    request: PullRequest, trust: Trust, store: Store, target: Named, fetched: Progress
) -> Result:
    found = registry.plan(
        target.reference,
        request.sources.hubs,
        store,
        trust=trust,
        signing=request.signing,
        offline=request.sources.offline,
        go_online=request.sources.go_online,
    )
    if isinstance(found, PullResult):
        return Pulled(found)
    if request.signing.required and found.signature is None:
        NOT_SIGNED.require(f"{found.id.reference} on {found.hub.title}")
    installed = store.find(found.id)
    here = installed is not None and found.digest == installed.digest
    return Offered(
        id=str(found.id),
        digest=found.digest,
        already_present=here,
        hub=found.hub.name,
        revision=found.hub.revision,
        warnings=found.warnings,
        files=() if here else tuple(found.files),
    )


def _computed(
    request: PullRequest, trust: Trust, target: Named, error: OscarZooError, observer: Observer
) -> Result:
    """What was computed because nobody has the artifact, or would be. Else the error, which may
    name computing as the next step."""
    choice = model_to_compute(target, error)
    if choice is None:
        return error
    tell_of_folder(target, error)
    text = "FOLDER" if choice.on_no_hub else target.text
    return _attempt(partial(_compute, request, trust, choice, text, error, observer))


def _compute(
    request: PullRequest,
    trust: Trust,
    choice: ModelChoice,
    text: str,
    error: OscarZooError,
    observer: Observer,
) -> Result:
    check_used(choice, request.wish.revision)
    again = partial(request.command_line, text)
    if request.wish.may_compute(error):
        choice.check_can_be_had(again(compute=True))
    plan = plan_instead(choice, request.wish, error, observer, again=again)
    if request.dry_run:
        return plan
    from oscar_zoo.app.obtain import obtain

    obtained = obtain(plan, trust, observer)
    return Pulled(obtained.pulled, _copy(obtained.pulled, request), obtained.computed)
