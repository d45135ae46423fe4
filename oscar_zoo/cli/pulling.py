"""`pull` of many artifacts at once: how they run side by side, what nobody has, and what people and
programs see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from oscar_zoo.app.compute_plan import (
    ComputeWish,
    compute_command,
    model_to_compute,
    plan_computing,
    refusal,
)
from oscar_zoo.app.targets import parse_named
from oscar_zoo.artifact.names import Reference
from oscar_zoo.cli.pasting import pasted, serving
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.computing import computed_facts, plan_sentence
from oscar_zoo.cli.render.progress import current
from oscar_zoo.errors import OscarZooError
from oscar_zoo.hubs.base import Hub, Progress
from oscar_zoo.hubs.deadline import in_parallel
from oscar_zoo.registry.export import export
from oscar_zoo.registry.model_names import ModelChoice, check_made_for
from oscar_zoo.registry.pull import PullResult, plan, pull
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.view import HubView

PARALLEL_ARTIFACTS = 4


@dataclass(frozen=True)
class PullRequest:
    """What the command line asks for, besides the names; `folders` are the models that some were
    asked for by."""

    hubs: tuple[Hub, ...]
    trust: Trust
    offline: bool = False
    output: Path | None = None
    force: bool = False
    folders: Mapping[Reference, Path] = field(default_factory=dict)


def everything(hubs: Sequence[Hub]) -> list[Reference]:
    """Every version of every hub that answers by its full name, each once, without the withdrawn
    ones."""
    found: dict[str, Reference] = {}
    for hub in hubs:
        view = HubView.open(hub)
        for artifact in hub.artifacts():
            if view.status(artifact).state != "yanked":
                found.setdefault(artifact.key, Reference(artifact.model, artifact.tag))
    return [found[key] for key in sorted(found)]


def pull_all(
    names: Sequence[Reference], request: PullRequest, *, progress: bool
) -> list[dict[str, Any] | OscarZooError]:
    """Pull every name, some at a time; one result per name, in order: what was done, or the
    error."""
    store = Store()
    several = len(names) > 1
    with terminal.progress("bytes", enabled=progress) as advance:
        calls = []
        for name in names:
            label = f"{name.name.rsplit('/', 1)[-1]} " if several else ""
            tell = partial(_tell, advance, label)
            calls.append(partial(_attempt, partial(_pull, name, request, store, tell)))
        return in_parallel(calls, workers=PARALLEL_ARTIFACTS)


def plan_all(
    names: Sequence[Reference], request: PullRequest
) -> list[dict[str, Any] | OscarZooError]:
    """What `pull_all` would do; nothing is fetched but listings."""
    store = Store()
    return in_parallel([partial(_attempt, partial(_plan, name, request, store)) for name in names])


def compute_missing(
    texts: Mapping[Reference, str],
    results: Sequence[dict[str, Any] | OscarZooError],
    request: PullRequest,
    wish: ComputeWish,
    *,
    dry_run: bool,
) -> list[dict[str, Any] | OscarZooError]:
    """`results` with what nobody had computed, one after the other; without that wish, with
    computing as next step.

    Args:
        texts: the names as they were typed, in the order of `results`.
        wish: what the command line says about computing.
        dry_run: only say what would be computed.
    """
    done: list[dict[str, Any] | OscarZooError] = []
    for text, result in zip(texts.values(), results, strict=True):
        choice = None
        if isinstance(result, OscarZooError):
            choice = model_to_compute(parse_named(text), result, current(), model=None)
        if choice is None or not isinstance(result, OscarZooError):
            done.append(result)
        elif not wish.compute:
            line = compute_command("pull", "FOLDER" if choice.on_no_hub else text)
            done.append(refusal(result, line, choice))
        else:
            make = _plan_made if dry_run else _make
            done.append(_attempt(partial(make, choice, request, wish, result)))
    return done


def _plan_made(
    choice: ModelChoice, request: PullRequest, wish: ComputeWish, error: OscarZooError
) -> dict[str, Any]:
    choice.check_can_be_had(compute_command("pull", "FOLDER"))
    plan = plan_computing(choice, wish, error, current())
    facts = {
        "id": None,
        "model": choice.source,
        "digest": None,
        "already_present": False,
        "computed": True,
    }
    cost = {"bytes": 0, "estimated_seconds": plan.seconds, "plan": plan_sentence(plan.facts)}
    return facts | {"files": [], "warnings": [], "notes": [note.text for note in plan.notes]} | cost


def _make(
    choice: ModelChoice, request: PullRequest, wish: ComputeWish, error: OscarZooError
) -> dict[str, Any]:
    from oscar_zoo.app.obtain import obtain

    choice.check_can_be_had(compute_command("pull", "FOLDER"))
    with current() as observer:
        plan = plan_computing(choice, wish, error, observer)
        obtained = obtain(plan, request.trust, observer)
    row = _row(obtained.pulled) | computed_facts(obtained.computed)
    return _exported(row, obtained.pulled, request)


def _attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | OscarZooError:
    try:
        return call()
    except OscarZooError as error:
        return error


def _tell(advance: terminal.ProgressCallback, label: str, file: str, done: int, total: int) -> None:
    advance(done, total, label + file)


def _pull(
    name: Reference, request: PullRequest, store: Store, progress: Progress
) -> dict[str, Any]:
    result = pull(
        name, request.hubs, store, trust=request.trust, offline=request.offline, progress=progress
    )
    if name in request.folders:
        check_made_for(request.folders[name], result.artifact.manifest)
    return _exported(_row(result), result, request)


def _exported(row: dict[str, Any], result: PullResult, request: PullRequest) -> dict[str, Any]:
    if request.output is not None:
        row["output"] = str(export(result.artifact, request.output, replace=request.force))
    return row


def _row(result: PullResult) -> dict[str, Any]:
    record = result.artifact.record
    return {
        "id": str(record.id),
        "digest": record.digest,
        "path": str(record.path),
        "base_model": result.artifact.manifest.model.id if result.artifact.manifest else None,
        "already_present": result.already_present,
        "level": result.level,
        "warnings": list(result.warnings),
        "first_use": result.first_use,
        "hub": result.hub,
        "revision": record.revision,
        "notes": list(result.notes),
        "computed": False,
    }


def _plan(name: Reference, request: PullRequest, store: Store) -> dict[str, Any]:
    found = plan(name, request.hubs, store, trust=request.trust)
    if isinstance(found, PullResult):
        return _row(found) | {"files": [], "bytes": 0}
    installed = store.find(found.id)
    here = installed is not None and found.digest == installed.digest
    files = (
        [] if here else [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in found.files]
    )
    return {
        "id": str(found.id),
        "digest": found.digest,
        "already_present": here,
        "warnings": list(found.warnings),
        "hub": found.hub.name,
        "revision": found.hub.revision,
        "computed": False,
        "files": files,
        "bytes": sum(file.size for file in found.files) if files else 0,
    }


def print_pulled(row: dict[str, Any], *, quiet: bool) -> None:
    """One artifact that is here now."""
    from oscar_zoo.artifact.outcome import warning_text

    console = terminal.out()
    reference = str(row["id"]).replace("/", ":", 1)
    for text in row["notes"]:
        terminal.note(f"note: {text}", quiet=quiet)
    if row["computed"]:
        console.print(f"Computed {terminal.clean(reference)}  {row['digest']}")
        console.print(f"verified to level {row['level']}; kept in {terminal.clean(row['path'])}")
    elif row["already_present"]:
        console.print(f"Already here and intact: {terminal.clean(reference)}  {row['digest']}")
    else:
        commit = f" @ {row['revision'][:7]}" if row["revision"] else ""
        console.print(
            f"Pulled {terminal.clean(reference)} from {terminal.clean(row['hub'] + commit)} "
            f" {row['digest']}"
        )
        console.print(f"verified to level {row['level']}; kept in {terminal.clean(row['path'])}")
    if row["first_use"]:
        terminal.note(
            "first use: nobody vouches for this digest; it is pinned from now on", quiet=quiet
        )
    for warning in row["warnings"]:
        terminal.note(f"warning: {warning_text(str(warning))}", quiet=quiet)
    if "output" in row:
        console.print(
            f"Copied to {terminal.clean(row['output'])}  for OSCAR scripts:"
            f" ROT_DIR={terminal.clean(row['output'])}"
        )
    if row.get("report"):
        terminal.note(f"Report: {row['report']}", quiet=quiet)
    if row["computed"] and Path(row["model"]).is_dir():
        terminal.note(
            f"Next: oscar-zoo serve {reference} --model {pasted(row['model'])}", quiet=quiet
        )
    else:
        terminal.note(
            serving(reference, row["base_model"] or row["id"].partition("/")[0]), quiet=quiet
        )


def print_planned(row: dict[str, Any]) -> None:
    """One artifact that would be fetched."""
    console = terminal.out()
    if row["computed"]:
        console.print(
            f"Would compute one for {terminal.clean(row['model'])} from"
            f" {terminal.clean(row['plan'])}"
        )
        for note in row["notes"]:
            terminal.note(f"note: {note}")
        return
    reference = terminal.clean(str(row["id"]).replace("/", ":", 1))
    if row["already_present"]:
        console.print(f"Already here: {reference}  {row['digest']}")
        return
    size = terminal.megabytes(row["bytes"])
    console.print(
        f"Would fetch {reference} from {terminal.clean(row['hub'])}, {len(row['files'])} files,"
        f" {size}"
    )
    for file in row["files"]:
        listed = file["sha256"] or terminal.NOT_REPORTED
        console.print(
            f"  {terminal.clean(file['path'])}  {terminal.megabytes(file['size'])}  sha256 {listed}"
        )
    for warning in row["warnings"]:
        terminal.note(f"warning: {warning}")
