"""An artifact that nobody has: computed, published to the zoo of this user, and pulled from there
like any other.

Work in progress lies in `<cache>/computing`, so an interrupted run goes on and leaves no artifact.
Of several processes that want the same model one computes and the others wait for its result. What
belongs to the artifact but is no part of it, its report and moments, is kept in
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
from typing import TYPE_CHECKING, Any

from oscar_zoo import paths
from oscar_zoo.artifact import durable, locks, strict_json
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.cli.offering import ComputePlan, announce
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.progress import Shown, course
from oscar_zoo.errors import (
    ArtifactNotFound,
    ConflictError,
    IntegrityError,
    OscarZooError,
    OutputExists,
)
from oscar_zoo.hubs import address
from oscar_zoo.next_step import AddOption, DropOption
from oscar_zoo.registry.model_names import check_made_for
from oscar_zoo.registry.publish import publish
from oscar_zoo.registry.pull import PullResult, pull
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import Trust

if TYPE_CHECKING:
    from oscar_zoo.compute.estimate import Estimate
    from oscar_zoo.compute.job import ComputeOptions, ComputeResult

LONGEST_WAIT = 6 * 3600.0
"""Seconds for another process to compute the same."""
_TARGET = "rotation"


@dataclass(frozen=True)
class Obtained:
    """An artifact that is in the store now.

    Attributes:
        pulled: as from any hub.
        facts: what a computation adds to the JSON of `pull`; empty when the zoo of this user had it
            after all.
    """

    pulled: PullResult
    facts: dict[str, Any]


def obtain(plan: ComputePlan, trust: Trust, *, silent: bool) -> Obtained:
    """Compute what `plan` says, unless the zoo of this user has an artifact for that model by now.

    Raises:
        OscarZooError: as `compute_artifact`, `publish` and `pull`; nothing is half-written then.
        ConflictError: another process is busy with it for hours.
    """
    with _turn(plan, silent=silent) as work:
        found = _from_own_zoo(plan, trust)
        if found is not None:
            return Obtained(found, {})
        announce(plan, silent=silent)
        result = _compute(plan, work, silent=silent)
        pulled = _publish(result, trust)
        kept = _keep(work, result.artifact_id)
        shutil.rmtree(work, ignore_errors=True)
    if result.choice is not None and not silent:
        from oscar_zoo.cli.render.choice import print_choice

        print_choice(result.choice)
    facts: dict[str, Any] = {
        "computed": True,
        "model": plan.choice.source,
        "seconds": dict(result.seconds),
    }
    facts["report"] = next((str(path) for path in kept if path.name.endswith(".report.html")), None)
    facts["moments"] = next((str(path) for path in kept if path.suffix == ".safetensors"), None)
    return Obtained(
        pulled, facts | {"estimated_seconds": plan.seconds, "notes": [*plan.notes, *result.notes]}
    )


@contextmanager
def _turn(plan: ComputePlan, *, silent: bool) -> Iterator[Path]:
    """The folder to work in, once nobody else computes for this model; one of our own where nobody
    can tell."""
    folder = paths.cache_dir() / "computing"
    with ExitStack() as stack:
        state = stack.enter_context(_lock(folder, plan, 0.0))
        if state == "late":
            terminal.note(
                f"Another process computes {plan.choice.name}: waiting for it.", quiet=silent
            )
            state = stack.enter_context(_lock(folder, plan, LONGEST_WAIT))
        if state == "late":
            raise ConflictError(
                f"another process has been computing {plan.choice.name} for hours.",
                hint="wait for it, or end it",
            )
        name = f"{plan.choice.name}-{_key(plan.options)}"
        yield folder / (name if state == "held" else f"{name}-{uuid.uuid4().hex[:8]}")


@contextmanager
def _lock(folder: Path, plan: ComputePlan, timeout: float) -> Iterator[locks.State]:
    with durable.storage_errors(f"cannot write {folder}"):
        durable.make_folders(folder, mode=0o700)
        place = folder / f"{plan.choice.name.casefold()}.lock"
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with locks.held_descriptor(descriptor, timeout=timeout) as state:
        yield state


def _key(options: ComputeOptions) -> str:
    """Of everything an interrupted computation cannot go on without."""
    place = Path(options.calib_data).expanduser()
    parts = [
        str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model,
        options.revision,
    ]
    parts += [
        str(place.resolve()) if place.exists() else str(options.calib_data),
        options.device,
        options.dtype,
    ]
    return sha256_hex(strict_json.canonical_bytes(parts))[:12]


def _from_own_zoo(plan: ComputePlan, trust: Trust) -> PullResult | None:
    choice, folder = plan.choice, Path(plan.choice.source)
    unnamed = (
        folder.is_dir() and choice.recipe is None
    )  # else the id tells models of one name apart
    try:
        wanted = Reference(choice.name) if unnamed else Reference.parse(choice.model_id)
        found = pull(wanted, address.open_hub(), Store(), trust=trust)
    except ArtifactNotFound:
        return None
    if folder.is_dir():
        check_made_for(folder, found.artifact.manifest)
    return found


def _compute(plan: ComputePlan, work: Path, *, silent: bool) -> ComputeResult:
    from oscar_zoo.compute.job import compute_artifact

    options = replace(plan.options, output_dir=work / _TARGET, resume=True, force=True)
    with watched(options, plan.cost, enabled=not silent) as advance:
        try:
            try:
                result = compute_artifact(options, progress=advance)
            except (
                OutputExists,
                IntegrityError,
            ):  # what was left there belongs to other data or versions
                shutil.rmtree(work, ignore_errors=True)
                result = compute_artifact(options, progress=advance)
        except OscarZooError as error:
            step = error.next_step
            if isinstance(step, AddOption | DropOption):  # not an option of the command that runs
                command = f"oscar-zoo compute {quote(plan.choice.source)}"
                error.next_step = replace(step, command=command)
            raise
    assert result is not None, "one process, by `Wish.check`"
    return result


@contextmanager
def watched(
    options: ComputeOptions, cost: Estimate | None = None, *, enabled: bool
) -> Iterator[Shown]:
    """Show how far `compute_artifact(options)` is, in the first process of several.

    Args:
        cost: what it will take, where that was asked already.
    """
    from oscar_zoo.compute.capture.run import is_main_process
    from oscar_zoo.compute.estimate import estimate
    from oscar_zoo.compute.phases import expected_phases
    from oscar_zoo.models.inspect import inspect_model

    enabled = enabled and is_main_process()
    if enabled and cost is None:
        cost = estimate(
            options,
            inspect_model(options.model, revision=options.revision, model_id=options.model_id),
        )
    phases = cost.phases if cost else expected_phases(options)
    with course(phases, timed=cost is not None, enabled=enabled) as shown:
        yield shown


def _publish(result: ComputeResult, trust: Trust) -> PullResult:
    """Into the zoo of this user, and from there into the store."""
    own = address.open_hub()
    try:
        publish(result.path, own, allow_warnings=True)
    except OscarZooError as error:
        error.advise(f"the result is kept in {result.path}; {error.hint or 'try again'}")
        raise
    made = result.artifact_id
    pins = [file.read().pin(made) for file in (trust.lock, trust.known) if file is not None]
    # the same matrices, computed again at another time, break no promise
    same = all(pin is None or pin.digest == result.manifest.digest for pin in pins)
    return pull(
        Reference(made.model, made.tag),
        own,
        Store(),
        trust=replace(trust, accept_new=trust.accept_new or same),
    )


def _keep(work: Path, made: ArtifactId) -> list[Path]:
    """Move report and moments to where they stay."""
    folder = paths.data_dir() / "computed" / made.model
    kept = []
    with durable.storage_errors(f"cannot write {folder}"):
        durable.make_folders(folder)
        for path in sorted(work.glob(f"{_TARGET}.*")):
            if path.is_file():
                kept.append(folder / f"{made.tag}{path.name.removeprefix(_TARGET)}")
                shutil.move(path, kept[-1])
    return kept
