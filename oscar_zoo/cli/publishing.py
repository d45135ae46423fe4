"""What the commands that write to hubs share: which hubs, one after the other, and how results
look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import OfflineError, OscarZooError
from oscar_zoo.hubs import address, config
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry.publish import PublishPlan, PublishResult
from oscar_zoo.registry.status import StatusResult

R = TypeVar("R")


def writable_hubs(texts: Sequence[str]) -> tuple[Hub, ...]:
    """The hubs to write to, in order, ModelScope last; default `publish` of `config.toml`, else the
    zoo of this user.

    Raises:
        OfflineError: one of them needs the network in offline mode.
    """
    hubs = address.publishing_hubs(texts)
    for hub in hubs:
        refuse_offline(hub)
    return hubs


def refuse_offline(hub: Hub) -> None:
    """Raise `OfflineError` when offline mode forbids asking `hub`."""
    if address.is_remote(hub.name) and config.load().offline:
        raise OfflineError(
            f"{hub.title} cannot be reached in offline mode.",
            hint="unset OSCAR_ZOO_OFFLINE and HF_HUB_OFFLINE",
        )


def on_each(
    hubs: Sequence[Hub], call: Callable[[Hub], R], show: Callable[[Hub, R], None]
) -> OscarZooError | None:
    """Run `call` on each hub until one fails, showing what was done; the first hub's error is
    raised.

    Returns:
        The error of a later hub, after which nothing was tried.
    """
    for position, hub in enumerate(hubs):
        try:
            result = call(hub)
        except OscarZooError as error:
            if position == 0:
                raise
            return error
        show(hub, result)
    return None


def report(
    schema: str, rows: list[dict[str, Any]], error: OscarZooError | None, *, as_json: bool
) -> int:
    """Print the JSON object, or the error of a later hub; returns the exit code."""
    from oscar_zoo.cli.main import exit_code

    if as_json:
        errors = (
            []
            if error is None
            else [{"code": error.code, "message": error.message, "hint": error.hint}]
        )
        terminal.emit_json({"schema": schema, "hubs": rows, "errors": errors})
    elif error is not None:
        terminal.print_error(error.code, error.message, error.hint, as_json=False)
    return 0 if error is None else exit_code(error)


def publish_row(hub: Hub, result: PublishResult) -> dict[str, Any]:
    """The facts of one publish."""
    return {
        "hub": hub.name,
        "id": str(result.id),
        "digest": result.digest,
        "already_published": result.already_published,
        "revision": result.revision,
        "proposal": result.proposal,
        "tag": result.tag,
        "warnings": [*result.verified.warnings, *result.warnings],
        "plan": None if result.plan is None else _plan_row(result.plan),
    }


def _plan_row(plan: PublishPlan) -> dict[str, Any]:
    files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in plan.files]
    return {
        "files": files,
        "message": plan.message,
        "parent": plan.parent,
        "tag": plan.tag,
        "serial": plan.serial,
    }


def print_published(hub: Hub, result: PublishResult, *, quiet: bool) -> None:
    """One publish for people."""
    console, reference, place = (
        terminal.out(),
        terminal.clean(result.id.reference),
        terminal.clean(hub.name),
    )
    for warning in (*result.verified.warnings, *result.warnings):
        terminal.note(f"warning: {warning_text(warning)}", quiet=quiet)
    if result.plan is not None and result.plan.message is not None:
        console.print(f"Would publish: {reference} on {place}  {result.digest}")
        _print_plan(result.plan)
        return
    if result.proposal is not None:
        console.print(f"Proposed: {reference} on {place}  {result.digest}")
        terminal.note(f"Next: ask its owner to merge {result.proposal}", quiet=quiet)
        return
    verb = "Already published" if result.already_published else "Published"
    console.print(f"{verb}: {reference} on {place}  {result.digest}")
    if result.tag is not None and result.revision is not None:
        console.print(
            f"commit {terminal.clean(result.revision[:12])}, tag {terminal.clean(result.tag)}"
        )


def _print_plan(plan: PublishPlan) -> None:
    console = terminal.out()
    width = max(len(file.path) for file in plan.files)
    for file in plan.files:
        path = terminal.clean(f"{file.path:<{width}}")
        console.print(f"  {path}  {terminal.megabytes(file.size):>9}  sha256 {file.sha256}")
    parent = f" on {plan.parent[:12]}" if plan.parent else ""
    console.print(f"  commit{terminal.clean(parent)}: {terminal.clean(plan.message)}")
    tag = f", tag {plan.tag}" if plan.tag else ""
    console.print(f"  index serial {plan.serial}{terminal.clean(tag)}")


def status_row(hub: Hub, result: StatusResult) -> dict[str, Any]:
    """The facts of one changed status."""
    return {
        "hub": hub.name,
        "id": str(result.id),
        "digest": result.digest,
        "status": result.status.model_dump(mode="json"),
        "changed": result.changed,
        "serial": result.serial,
        "revision": result.revision,
        "proposal": result.proposal,
    }


def print_status(hub: Hub, result: StatusResult, *, quiet: bool) -> None:
    """One changed status for people."""
    reference, place = terminal.clean(result.id.reference), terminal.clean(hub.name)
    verb = "Proposed" if result.proposal else "Now" if result.changed else "Already"
    reason = f": {result.status.reason}" if result.status.reason else ""
    terminal.out().print(
        f"{verb} {result.status.state}{terminal.clean(reason)}  {reference} on {place}"
    )
    if result.proposal is not None:
        terminal.note(f"Next: ask its owner to merge {result.proposal}", quiet=quiet)


def change_status(
    name: str, state: str, hubs: Sequence[str], *, quiet: bool, as_json: bool, **details: Any
) -> int:
    """Set the status of `name` on every hub and show it; returns the exit code."""
    from oscar_zoo.registry.status import set_status

    rows: list[dict[str, Any]] = []

    def call(hub: Hub) -> StatusResult:
        with terminal.waiting(f"Writing to {hub.title}", enabled=not (quiet or as_json)):
            return set_status(hub, name, state, **details)  # type: ignore[arg-type]

    def show(hub: Hub, result: StatusResult) -> None:
        rows.append(status_row(hub, result))
        if not as_json:
            print_status(hub, result, quiet=quiet)

    error = on_each(writable_hubs(hubs), call, show)
    return report("oscar-zoo.status/1", rows, error, as_json=as_json)
