"""What the commands that write to hubs show: publish and mirror."""

from __future__ import annotations

from shlex import quote

from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.login import Account
from oscar_zoo.registry.mirror import MirrorReport, MirrorResult
from oscar_zoo.registry.params import LoginParams, MirrorParams, PublishParams
from oscar_zoo.registry.publish import PublishPlan, PublishReport, PublishResult


def print_published(report: PublishReport, params: PublishParams, *, quiet: bool) -> None:
    """Every publish for people, and why the next hub did not take it."""
    for result in report.hubs:
        _print_published(result, quiet=quiet)
    terminal.print_failure(report.error)


def _print_published(result: PublishResult, *, quiet: bool) -> None:
    """One publish, and how to fetch it."""
    console, place = terminal.out(), terminal.clean(result.hub)
    reference = terminal.clean(result.id.reference)
    for warning in (*result.verified.warnings, *result.warnings):
        terminal.note(f"warning: {warning_text(warning)}", quiet=quiet)
    if result.plan is not None and result.plan.message is not None:
        console.print(f"Would publish: {reference} on {place}  {result.digest}")
        _print_plan(result.plan, commits=address.is_remote(result.hub))
        return
    if result.proposal is not None:
        console.print(f"Proposed: {reference} on {place}  {result.digest}")
        terminal.note(f"Next: ask its owner to merge {result.proposal}", quiet=quiet)
        return
    verb = "Already published" if result.already_published else "Published"
    verb += ", scores updated" if result.scores_updated else ""
    console.print(f"{verb}: {reference} on {place}  {result.digest}")
    if result.tag is not None and result.revision is not None:
        commit, tag = terminal.clean(result.revision[:12]), terminal.clean(result.tag)
        console.print(f"commit {commit}, tag {tag}")
    if result.revision is not None:
        again = f"oscar-zoo pull {result.id.reference} --hub {quote(result.hub)}"
        terminal.note(f"Next: {again}", quiet=quiet)


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
        user = terminal.clean(account.user)
        terminal.out().print(f"Logged in to Hugging Face as {user} ({source})")
    else:
        terminal.out().print(f"ModelScope gets the token in {source}; nothing else is needed")


def print_mirrored(result: MirrorResult) -> None:
    """One mirrored artifact for people."""
    reference, size = terminal.clean(result.id.reference), terminal.megabytes(result.size)
    done = "Would copy" if result.outcome == "would be copied" else result.outcome.capitalize()
    terminal.out().print(f"{done}: {reference}  {size}  {result.digest}")
    for warning in result.warnings:
        terminal.note(f"warning: {warning_text(warning)}")
    if result.proposal is not None:
        terminal.note(f"Next: ask its owner to merge {result.proposal}")


def print_end_of_mirror(report: MirrorReport, params: MirrorParams, *, quiet: bool) -> None:
    """What holds after all artifacts were copied, which were told one by one."""
    count = len(report.artifacts)
    if count and not (params.dry_run or params.create_pr):
        artifacts = terminal.counted(count, "artifact")
        terminal.note(f"{artifacts}: both hubs list the same digests", quiet=quiet)
