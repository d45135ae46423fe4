"""What the commands that write to hubs show: publish and mirror."""

from __future__ import annotations

from shlex import quote
from typing import Any

from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.login import Account
from oscar_zoo.registry.params import LoginParams
from oscar_zoo.registry.publish import PublishPlan, PublishResult
from oscar_zoo.registry.writing import Written


def emit_report(
    schema: str, rows: list[dict[str, Any]], error: OscarZooError | None, *, as_json: bool
) -> None:
    """Print the one JSON object with `rows`, or for people the error of a later hub."""
    if as_json:
        errors = [] if error is None else [terminal.error_facts(error)]
        terminal.emit_json({"schema": schema, "hubs": rows, "errors": errors})
    elif error is not None:
        terminal.print_error(error.code, error.message, error.hint, as_json=False)


def publish_row(written: Written[PublishResult]) -> dict[str, Any]:
    """The facts of one publish."""
    result = written.result
    return {
        "hub": written.hub,
        "id": str(result.id),
        "digest": result.digest,
        "already_published": result.already_published,
        "scores_updated": result.scores_updated,
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


def print_published(written: Written[PublishResult], *, quiet: bool) -> None:
    """One publish for people, and how to fetch it."""
    console, result, place = terminal.out(), written.result, terminal.clean(written.hub)
    reference = terminal.clean(result.id.reference)
    for warning in (*result.verified.warnings, *result.warnings):
        terminal.note(f"warning: {warning_text(warning)}", quiet=quiet)
    if result.plan is not None and result.plan.message is not None:
        console.print(f"Would publish: {reference} on {place}  {result.digest}")
        _print_plan(result.plan, commits=address.is_remote(written.hub))
        return
    if result.proposal is not None:
        console.print(f"Proposed: {reference} on {place}  {result.digest}")
        terminal.note(f"Next: ask its owner to merge {result.proposal}", quiet=quiet)
        return
    verb = "Already published" if result.already_published else "Published"
    verb += ", scores updated" if result.scores_updated else ""
    console.print(f"{verb}: {reference} on {place}  {result.digest}")
    if result.tag is not None and result.revision is not None:
        console.print(
            f"commit {terminal.clean(result.revision[:12])}, tag {terminal.clean(result.tag)}"
        )
    if result.revision is not None:
        terminal.note(
            f"Next: oscar-zoo pull {result.id.reference} --hub {quote(written.hub)}", quiet=quiet
        )


def _print_plan(plan: PublishPlan, *, commits: bool) -> None:
    """What would be written; `commits` says whether the hub has commits and tags."""
    console = terminal.out()
    width = max(len(file.path) for file in plan.files)
    for file in plan.files:
        path = terminal.clean(f"{file.path:<{width}}")
        console.print(f"  {path}  {terminal.megabytes(file.size):>9}  sha256 {file.sha256}")
    if commits:
        parent = f" on {plan.parent[:12]}" if plan.parent else ""
        console.print(f"  commit{terminal.clean(parent)}: {terminal.clean(plan.message)}")
    tag = f", tag {plan.tag}" if plan.tag and commits else ""
    console.print(f"  index serial {plan.serial}{terminal.clean(tag)}")


def print_account(account: Account, params: LoginParams, *, quiet: bool) -> None:
    """Who one is on a hub now."""
    source = terminal.clean(account.source)
    if account.user is not None:
        terminal.out().print(
            f"Logged in to Hugging Face as {terminal.clean(account.user)} ({source})"
        )
    else:
        terminal.out().print(f"ModelScope gets the token in {source}; nothing else is needed")
