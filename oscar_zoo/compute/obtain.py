"""Make an artifact that nobody has published: compute it, publish it to the zoo of this user, and
pull it from there like any other. Computing is planned, started or only named as the next step.

Work in progress lies in `<cache>/computing`, so that an interrupted run continues and leaves no
artifact. If several processes request the same model, one computes and the others wait for its
result. The report and the moments are not part of the artifact; they are kept in
`<data>/computed/<Model>`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from oscar_zoo import paths
from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.compute.compute import not_served_notes, plan_job, run_job, serving_refusal
from oscar_zoo.compute.params import ComputeParams
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import (
    ArtifactNotFound,
    ConflictError,
    IntegrityError,
    NetworkError,
    OscarZooError,
    OutputExists,
)
from oscar_zoo.next_step import Compute, OptionStep
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.fetch import PullJob, PullResult
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.publish import Publishable, publish_on
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.targets import ComputeWish, ModelChoice, check_made_for, propose_computing
from oscar_zoo.registry.trust import Trust

if TYPE_CHECKING:
    from oscar_zoo.compute.estimate import Estimate
    from oscar_zoo.compute.options import Job
    from oscar_zoo.compute.outcome import ComputeResult


LONGEST_WAIT = 6 * 3600.0
"""Seconds to wait for another process that computes the same artifact."""
_TARGET = "rotation"


@dataclass(frozen=True)
class ComputePlan:
    """A computation that can be started: `job` is all but the output folder, `cost` what it will
    take, where that can be estimated, `notes` what the user should know before it starts."""

    choice: ModelChoice
    job: Job
    cost: Estimate | None
    notes: tuple[Note, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The estimated duration."""
        return self.cost.seconds if self.cost else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The plan in plain values, for notes and questions. `fetched_bytes` are weights that may
        have to be downloaded first, or `None`."""
        here = Path(self.choice.source).is_dir()
        return {
            "model": self.choice.name,
            "tokens": self.job.calib_tokens,
            "data": str(self.job.calib_data),
            "device": self.job.device,
            "seconds": self.seconds,
            "fetched_bytes": self.cost.weight_bytes if self.cost and not here else None,
        }


def plan_instead(
    choice: ModelChoice,
    wish: ComputeWish,
    error: OscarZooError,
    observer: Observer,
    *,
    again: Callable[..., str],
) -> ComputePlan:
    """The plan to compute what a search did not find, if the caller wishes that; the observer may
    be asked. Else `error` is raised, with computing as the next step where that is possible."""
    if wish.may_compute(error):
        plan = plan_computing(choice, wish, error, observer)
        asked = f"No artifact for {choice.name} exists. Compute one now?"
        if wish.compute or observer.confirm(Note("compute.question", asked, plan.facts)):
            return plan
        error.message = f"nothing was computed for {choice.name}."
        error.args = (error.message,)
        error.advise(next_step=Compute(choice.name, again(compute=True)))
        raise error
    propose_computing(choice, error, again)
    raise error


def plan_computing(
    choice: ModelChoice, wish: ComputeWish, error: OscarZooError, observer: Observer
) -> ComputePlan:
    """What `compute` would do with its defaults, and how long that takes; no weights are read."""
    require_compute()
    if isinstance(error, NetworkError):  # a hub that does not answer may have an artifact
        observer.note(Note("hub.unreachable", error.said or error.message))
    if wish.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # libraries that are imported later read it
    given = {"calib_data": wish.calib_data, "device": wish.device, "revision": wish.revision}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    job, model = plan_job(ComputeParams(choice.source, **changes), choice)
    from oscar_zoo.compute.estimate import estimate

    job.check()
    refused = serving_refusal(model.written, model.block.id)
    if refused is not None and wish.to_serve:
        raise refused
    return ComputePlan(choice, job, estimate(job, model), not_served_notes(refused))


def obtain(
    plan: ComputePlan, trust: Trust, observer: Observer
) -> tuple[PullResult, ComputeResult | None]:
    """Compute what `plan` says, unless this user's zoo has an artifact for that model by now: the
    artifact as pulled from there, and what was computed, whose folder is gone, with the places of
    the report and the moments."""
    with _turn(plan, observer) as work:
        found = _from_own_zoo(plan, trust)
        if found is not None:
            return found, None
        name = plan.choice.name
        text = f"No artifact for {name} was found. Computing one."
        observer.note(Note("compute.start", text, plan.facts, kind="step"))
        for note in plan.notes:
            observer.note(note)
        text = "Ctrl-C stops it; the same command continues from there."
        observer.note(Note("compute.resumable", text, kind="step"))
        result = _compute(plan, work, observer)
        pulled = _publish(result, trust)
        kept = _keep(work, result.manifest.artifact_id)
        shutil.rmtree(work, ignore_errors=True)
    if result.choice is not None:
        text = f"Kept {result.choice.chosen.method}: {result.choice.reason}"
        observer.note(Note("compute.choice", text, {"choice": result.choice}, kind="step"))
    report = next((path for path in kept if path.name.endswith(".report.html")), None)
    moments = next((path for path in kept if path.suffix == ".safetensors"), None)
    return pulled, replace(result, report=report, moments=moments)


@contextmanager
def _turn(plan: ComputePlan, observer: Observer) -> Iterator[Path]:
    """The folder to work in, once no other process computes for this model. Where locks do not
    work, the folder belongs to this process alone."""
    folder, name = paths.cache_dir() / "computing", plan.choice.name
    with ExitStack() as stack:
        state = stack.enter_context(_lock(folder, name, 0.0))
        if state == "late":
            text = f"Another process computes {name}: waiting for it."
            observer.note(Note("compute.wait", text, {"model": name}, kind="step"))
            state = stack.enter_context(_lock(folder, name, LONGEST_WAIT))
        if state == "late":
            raise ConflictError(
                f"another process has been computing {name} for hours.",
                hint="wait for it, or end it",
            )
        label = f"{name}-{_key(plan.job)}"
        yield folder / (label if state == "held" else f"{label}-{uuid.uuid4().hex[:8]}")


@contextmanager
def _lock(folder: Path, name: str, timeout: float) -> Iterator[durable.State]:
    with durable.storage_errors(f"cannot write {folder}", cache=True):
        durable.check_private(folder.parent, folder)
        durable.make_folders(folder, mode=0o700)
        place = folder / f"{name.casefold()}.lock"
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with durable.held_descriptor(descriptor, timeout=timeout) as state:
        yield state


def _key(job: Job) -> str:
    """A hash of everything that an interrupted computation needs unchanged to continue."""
    place = Path(job.calib_data).expanduser()
    model = str(Path(job.model).resolve()) if Path(job.model).is_dir() else job.model
    text = str(place.resolve()) if place.exists() else str(job.calib_data)
    parts = [model, job.revision, text, job.device, job.dtype]
    return sha256_hex(strict_json.canonical_bytes(parts))[:12]


def _from_own_zoo(plan: ComputePlan, trust: Trust) -> PullResult | None:
    """The artifact, if another process published it to the zoo of this user in the meantime."""
    choice, folder = plan.choice, Path(plan.choice.source)
    # two folders may have one name; the id of a known model or of a hub is unique
    by_name = folder.is_dir() and choice.recipe is None
    try:
        wanted = Reference(choice.name) if by_name else Reference.parse(choice.model_id)
        found = PullJob(wanted, [address.open_hub()], Store(), trust=trust).pull()
    except ArtifactNotFound:
        return None
    if folder.is_dir():
        check_made_for(choice, found.artifact.manifest)
    return found


def _compute(plan: ComputePlan, work: Path, observer: Observer) -> ComputeResult:
    earlier = work.exists()  # left by a run that was interrupted
    job = replace(plan.job, output=work / _TARGET, resume=earlier or None, force=True)
    try:
        try:
            result = run_job(job, observer, cost=plan.cost)
        except (OutputExists, IntegrityError):  # the folder holds work of other data or versions
            shutil.rmtree(work, ignore_errors=True)
            result = run_job(job, observer, cost=plan.cost)
    except OscarZooError as error:
        step = error.next_step
        if isinstance(step, OptionStep):  # not an option of the command that runs
            error.next_step = step.of(f"oscar-zoo compute {quote(plan.choice.source)}")
        raise
    return result


def _publish(result: ComputeResult, trust: Trust) -> PullResult:
    """Publish to the zoo of this user, and pull from there into the store."""
    own = address.open_hub()
    try:
        publish_on(own, Publishable.read(result.path, allow_warnings=True))
    except OscarZooError as error:
        error.advise(f"the result is kept in {result.path}; {error.hint or 'try again'}")
        raise
    made = result.manifest.artifact_id
    pins = [file.read().pin(made) for file in (trust.lock, trust.known) if file is not None]
    # the same matrices, computed again at another time, break no promise
    same = all(pin is None or pin.digest == result.manifest.digest for pin in pins)
    taken = replace(trust, accept_new=trust.accept_new or same)
    return PullJob(Reference(made.model, made.tag), [own], Store(), trust=taken).pull()


def _keep(work: Path, made: ArtifactId) -> list[Path]:
    """Move report and moments to the folder where they stay."""
    folder = paths.data_dir() / "computed" / made.model
    kept = []
    with durable.storage_errors(f"cannot write {folder}"):
        durable.make_folders(folder)
        for path in sorted(work.glob(f"{_TARGET}.*")):
            if path.is_file():
                kept.append(folder / f"{made.tag}{path.name.removeprefix(_TARGET)}")
                shutil.move(path, kept[-1])
    return kept
