"""Fetch artifacts by name, verify them and keep them in the local store.

Parameters become names and hubs; the first hub that has a name offers it; its index, signature and
every promise of the past must hold (`trust`); the files are fetched, verified and stored (`fetch`),
and pinned. What a project's lock names and the store has costs no request. What nobody has may be
computed, which is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import InstanceOf, PlainSerializer, computed_field

from oscar_zoo.artifact.durable import check_folder
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.outcome import Digest, says
from oscar_zoo.errors import NotLocked, OscarZooError, UsageError
from oscar_zoo.models.config_file import ConfigFile, check_cache
from oscar_zoo.observer import SILENT, Observer, Silent
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import Artifact, pulled_artifact
from oscar_zoo.registry.changes import ErrorFacts, facts_of
from oscar_zoo.registry.fetch import ListedFile, PullJob, PullResult
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import Progress, in_parallel
from oscar_zoo.registry.params import PullParams, command_line, option_words
from oscar_zoo.registry.pins import PinFile, project_root
from oscar_zoo.registry.signatures import NOT_SIGNED
from oscar_zoo.registry.store import Store, export
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.view import every_version
from oscar_zoo.verb import checked, shows

PARALLEL_ARTIFACTS = 4


@dataclass(frozen=True)
class Offered:
    """With --dry-run: an artifact that would be fetched."""

    id: str
    digest: Annotated[Digest | None, says("Null where the hub does not say.")]
    already_present: Annotated[bool, says("Whether nothing would have to be fetched.")]
    hub: Annotated[str, says("The hub that has it.")]
    revision: Annotated[str | None, says("Commit of the hub.")]
    warnings: Annotated[
        tuple[str, ...],
        says("Codes of verification, and sentences about the status of the version."),
    ]
    files: Annotated[tuple[ListedFile, ...], says("That would be fetched.")]
    computed: Literal[False] = False

    @computed_field(description="That would be fetched.")
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Planned:
    """With --dry-run: an artifact that would be computed, because nobody has it."""

    model: Annotated[str, says("The model that would be read.")]
    notes: Annotated[tuple[str, ...], says("Remarks for people.")]
    estimated_seconds: Annotated[
        float | None, says("How long it would take; null where nobody can say.")
    ]
    plan: Annotated[str, says("What would be done, in a sentence.")]
    id: None = None
    digest: None = None
    already_present: Literal[False] = False
    computed: Literal[True] = True
    files: tuple[()] = ()
    warnings: tuple[str, ...] = ()
    bytes: Literal[0] = 0


Result = PullResult | Offered | Planned


@dataclass(frozen=True)
class PullReport:
    """What oscar-zoo pull prints: one entry for each name that could be had, and one error for each
    that could not."""

    dry_run: Annotated[bool, says("Whether nothing was fetched.")]
    artifacts: tuple[Result, ...]
    errors: Annotated[
        tuple[InstanceOf[OscarZooError], ...],
        PlainSerializer(facts_of, return_type=list[ErrorFacts]),
    ] = ()
    new_lock: Annotated[Path | None, says("The lock file, where it was created now.")] = None
    schema: Literal["oscar-zoo.pull/1"] = "oscar-zoo.pull/1"

    @property
    def error(self) -> OscarZooError | None:
        return self.errors[0] if self.errors else None


Again = Callable[..., str]
"""The command line that means the same, with options to add or to replace."""
Instead = Callable[[targets.ModelChoice, OscarZooError, Trust, Again], PullResult | Planned]
"""What becomes of a search that found nothing: the model that the name or the folder means, what
the search said, the promises to keep, and the command line."""


def name_computing(
    choice: targets.ModelChoice, error: OscarZooError, trust: Trust, again: Again
) -> PullResult | Planned:
    targets.propose_computing(choice, error, again)
    raise error


def run(
    params: PullParams, observer: Observer = SILENT, instead: Instead = name_computing
) -> PullReport:
    """Fetch, verify and keep every target, several at a time. What nobody has goes to `instead`,
    one after the other. The error of one of several targets is its result."""
    sources = Sources(params.hubs, offline=params.offline)
    named = [targets.parse_named(name) for name in params.names]
    _check(params)
    trust = _trust(params)
    lock = trust.lock.path if trust.lock and not trust.lock.path.exists() else None
    if params.everything:
        named = [targets.NameTarget(str(name), name) for name in every_version(sources.hubs)]
    once: dict[Reference, targets.ModelTarget | targets.NameTarget] = {}
    for target in named:
        once.setdefault(target.reference, target)
    wanted = list(once.values())
    several = len(wanted) > 1
    calls = [partial(_one, params, sources, trust, observer, one, several) for one in wanted]
    results = in_parallel(calls, workers=PARALLEL_ARTIFACTS)
    for at, target in enumerate(wanted):
        results[at] = _settled(results[at], target, params, trust, observer, instead)
    observer.begin((), timed=False)
    errors = tuple(result for result in results if isinstance(result, OscarZooError))
    if errors and not several:
        raise errors[0]
    return PullReport(
        params.dry_run,
        tuple(result for result in results if not isinstance(result, OscarZooError)),
        errors,
        lock if lock is not None and lock.exists() else None,
    )


@shows(PullParams)
def pull(
    name: str,
    *,
    hubs: str | Sequence[str] | None = None,
    lock: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Artifact:
    """Fetch, verify and keep an artifact, or check the copy that is here.

    Args:
        name: `NAME`, `NAME:TAG`, `NAME@sha256:PREFIX`; a Hugging Face id works too.
        hubs: asked in order; default `OSCAR_ZOO_HUB`, `config.toml`, else the zoo of this user and
            the public ones.
        lock: an `oscar-zoo.lock` to hold the artifact to, and to pin it in.
        progress: called with file, bytes so far and bytes in total, from several threads.
        options: of `oscar-zoo pull`, such as `output`, `locked`, `offline`, `keys`.

    Raises:
        NotFoundError: nobody has it.
        AmbiguousName: `name` means several versions.
        NetworkError: no hub answered.
        AccessError: a hub wants a login or refuses.
        IntegrityError: bytes are not what they must be; nothing was kept.
        OutputExists: `output` holds other content.
        NotLocked: `locked`, and `lock` does not have it.
    """
    fixed = {
        "names": (name,),
        "dry_run": False,
        "hubs": (hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
        "lock": False if lock is None else None,
        "lock_file": lock,
    }
    (result,) = run(checked(PullParams, options | fixed), _Told(progress)).artifacts
    assert isinstance(result, PullResult), "nothing was asked to be planned"
    return pulled_artifact(result, result.output)


class _Told(Silent):
    def __init__(self, callback: Progress | None) -> None:
        self._callback = callback

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None:
        if self._callback is not None and unit == "bytes":
            self._callback(label, done, total)


def _check(params: PullParams) -> None:
    """Refuse what contradicts itself, and an output folder that cannot be written; one with files
    may have what is wanted."""
    if bool(params.names) == params.everything:
        raise UsageError(
            "name artifacts, or ask for --all of them.", hint="oscar-zoo list shows what there is"
        )
    no_lock = params.lock is False and params.lock_file is None
    pairs = {
        "--locked needs the lock that --no-lock leaves out.": params.locked and no_lock,
        "--locked takes what the lock has; --compute makes something new.": params.locked
        and params.compute,
        "--require-signature takes what somebody signed; --compute makes something new.": (
            params.require_signature and params.compute
        ),
    }
    for text, contradicts in pairs.items():
        if contradicts:
            raise UsageError(text, hint="drop one of the two")
    targets.ComputeWish(params.compute, calib_data=params.calib_data).check()
    output = params.output
    if output and not params.dry_run and not (output.is_dir() and any(output.iterdir())):
        check_folder(output)


def _trust(params: PullParams) -> Trust:
    lock: PinFile | None = None
    write = params.lock_file is not None
    if params.lock_file is not None:
        lock = PinFile(params.lock_file)
    elif params.lock is not False:
        lock = PinFile.of_project()
        write = bool(params.lock) or project_root() is not None or lock.path.exists()
    return Trust(
        lock=lock,
        locked=params.locked,
        write_lock=write,
        accept_new=params.accept_new_digest,
        allow_downgrade=params.allow_downgrade,
    )


def _again(params: PullParams, name: str, **changes: Any) -> str:
    """The command line that means `params` for `name` alone."""
    changes |= {"everything": False, "locked": False}
    if changes.get("compute"):
        changes["require_signature"] = False
    return command_line(["pull", name, *option_words(params, **changes)])


def _one(
    params: PullParams,
    sources: Sources,
    trust: Trust,
    observer: Observer,
    target: targets.ModelTarget | targets.NameTarget,
    several: bool,
) -> Result | OscarZooError:
    label = f"{target.reference.name.rsplit('/', 1)[-1]} " if several else ""

    def told(file: str, done: int, total: int) -> None:
        observer.advance(label + file, done, total, "bytes")

    try:
        job = PullJob(
            target.reference,
            sources.hubs,
            Store(),
            trust=trust,
            signing=params,
            offline=sources.offline,
            go_online=sources.go_online,
            progress=told,
        )
        if params.dry_run:
            return _offered(job, params)
        result = job.pull()
        if isinstance(target, targets.ModelTarget):
            targets.check_made_for(target.choice, result.artifact.manifest)
        return _copied(result, params)
    except OscarZooError as error:
        return error


def _offered(job: PullJob, params: PullParams) -> Result:
    found = job.plan()
    if isinstance(found, PullResult):
        return replace(found, files=(), bytes=0)
    if params.require_signature and found.signature is None:
        NOT_SIGNED.require(f"{found.id.reference} on {found.hub.title}")
    installed = job.store.find(found.id)
    here = installed is not None and found.digest == installed.digest
    return Offered(
        id=str(found.id),
        digest=found.digest,
        already_present=here,
        hub=found.hub.name,
        revision=found.hub.revision,
        warnings=found.warnings,
        files=() if here else tuple(ListedFile(f.path, f.size, f.sha256) for f in found.files),
    )


def _settled(
    result: Result | OscarZooError,
    target: targets.ModelTarget | targets.NameTarget,
    params: PullParams,
    trust: Trust,
    observer: Observer,
    instead: Instead,
) -> Result | OscarZooError:
    """`result`, or what is made instead of it; an error with what its user can do."""
    if isinstance(result, OscarZooError) and (choice := targets.model_to_compute(target, result)):
        targets.tell_of_folder(target, result)
        again = partial(_again, params, "FOLDER" if choice.on_no_hub else target.text)
        try:
            config = ConfigFile.kept(choice.source, None)
            if config is not None:
                check_cache(config, choice.model_id)
            result = instead(choice, result, trust, again)
            if isinstance(result, PullResult):
                result = _copied(result, params)
        except OscarZooError as error:
            result = error
    if isinstance(result, NotLocked):
        again = partial(_again, params, target.text, dry_run=False)
        result.propose(again(), again(lock=True))
    namesake = target.model_namesake if isinstance(target, targets.NameTarget) else None
    targets.mention_namesake(
        namesake, result if isinstance(result, OscarZooError) else None, observer
    )
    return result


def _copied(result: PullResult, params: PullParams) -> PullResult:
    if params.output is None:
        return result
    return replace(result, output=export(result.artifact, params.output, replace=params.force))
