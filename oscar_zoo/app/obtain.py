"""Make an artifact that nobody has published: compute it, publish it to the zoo of this user, and
pull it from there like any other.

Work in progress lies in `<cache>/computing`, so that an interrupted run continues and leaves no
artifact. If several processes request the same model, one computes and the others wait for its
result. The report and the moments are not part of the artifact; they are kept in
`<data>/computed/<Model>`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from oscar_zoo import paths
from oscar_zoo.app.compute import run
from oscar_zoo.app.compute_plan import ComputePlan
from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import (
    ArtifactNotFound,
    ConflictError,
    IntegrityError,
    OscarZooError,
    OutputExists,
)
from oscar_zoo.next_step import AddOption, DropOption
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.fetch import PullJob, PullResult
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.publish import Publishable, publish_on
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.targets import check_made_for
from oscar_zoo.registry.trust import Trust

if TYPE_CHECKING:
    from oscar_zoo.compute.job import ComputeOptions, ComputeResult

LONGEST_WAIT = 6 * 3600.0
"""Seconds to wait for another process that computes the same artifact."""
_TARGET = "rotation"


@dataclass(frozen=True)
class Computed:
    """What was computed for an artifact.

    Attributes:
        plan: what was planned.
        result: what the computation gave; its folder is gone.
        report: the page about it, or `None` where it could not be drawn.
        moments: the file from which every method can be fitted again, or `None`.
    """

    plan: ComputePlan
    result: ComputeResult
    report: Path | None
    moments: Path | None


@dataclass(frozen=True)
class Obtained:
    """An artifact that is in the store now.

    Attributes:
        pulled: as from any hub.
        computed: `None` when the zoo of this user had the artifact after all.
    """

    pulled: PullResult
    computed: Computed | None


def obtain(plan: ComputePlan, trust: Trust, observer: Observer) -> Obtained:
    """Compute what `plan` says, unless this user's zoo has an artifact for that model by now."""
    with _turn(plan, observer) as work:
        found = _from_own_zoo(plan, trust)
        if found is not None:
            return Obtained(found, None)
        observer.note(plan.start)
        for note in plan.notes:
            observer.note(note)
        text = "Ctrl-C stops it; the same command continues from there."
        observer.note(Note("compute.resumable", text, kind="step"))
        result = _compute(plan, work, observer)
        pulled = _publish(result, trust)
        kept = _keep(work, result.artifact_id)
        shutil.rmtree(work, ignore_errors=True)
    if result.choice is not None:
        text = f"Kept {result.choice.chosen.method}: {result.choice.reason}"
        observer.note(Note("compute.choice", text, {"choice": result.choice}, kind="step"))
    report = next((path for path in kept if path.name.endswith(".report.html")), None)
    moments = next((path for path in kept if path.suffix == ".safetensors"), None)
    return Obtained(pulled, Computed(plan, result, report, moments))


@contextmanager
def _turn(plan: ComputePlan, observer: Observer) -> Iterator[Path]:
    """The folder to work in, once no other process computes for this model.

    Where locks do not work, the folder belongs to this process alone.
    """
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
        label = f"{name}-{_key(plan.options)}"
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


def _key(options: ComputeOptions) -> str:
    """A hash of everything that an interrupted computation needs unchanged to continue."""
    place = Path(options.calib_data).expanduser()
    parts = [
        str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model,
        options.revision,
        str(place.resolve()) if place.exists() else str(options.calib_data),
        options.device,
        options.dtype,
    ]
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
    options = replace(plan.options, output_dir=work / _TARGET, resume=earlier, force=True)
    try:
        try:
            result = run(options, observer, cost=plan.cost)
        except (OutputExists, IntegrityError):  # the folder holds work of other data or versions
            shutil.rmtree(work, ignore_errors=True)
            result = run(options, observer, cost=plan.cost)
    except (KeyboardInterrupt, SystemExit) as error:
        if hasattr(error, "__notes__"):  # something is kept
            error.add_note("to go on from there, run the same command again")
        raise
    except OscarZooError as error:
        step = error.next_step
        if isinstance(step, AddOption | DropOption):  # not an option of the command that runs
            command = f"oscar-zoo compute {quote(plan.choice.source)}"
            error.next_step = replace(step, command=command)
        raise
    assert result is not None, "one process, by `ComputeWish.check`"
    return result


def _publish(result: ComputeResult, trust: Trust) -> PullResult:
    """Publish to the zoo of this user, and pull from there into the store."""
    own = address.open_hub()
    try:
        publish_on(own, Publishable.read(result.path, allow_warnings=True))
    except OscarZooError as error:
        error.advise(f"the result is kept in {result.path}; {error.hint or 'try again'}")
        raise
    made = result.artifact_id
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
