"""What the small verbs of the zoo show: card, site, cache, yank, unyank and deprecate."""

from __future__ import annotations

import contextlib

import click

from oscar_zoo.cli.render import terminal
from oscar_zoo.site.build import BuiltSite, serving
from oscar_zoo.site.cache import CacheChecks, CacheFolder, Freed, RemovedArtifacts, Stored
from oscar_zoo.site.card import Card
from oscar_zoo.site.params import SiteParams
from oscar_zoo.site.status import StatusReport


def print_card(made: Card, _: object, *, quiet: bool) -> None:
    """The card itself, or where it was written."""
    if made.output is None:
        click.echo(made.content.decode("utf-8", "replace"), nl=False)
        return
    beside = f", its report beside it: {len(made.report)} files" if made.report else ""
    many = terminal.counted(len(made.artifacts), "artifact")
    terminal.out().print(terminal.clean(f"Wrote {made.output}: {many}{beside}"))


def print_site(built: BuiltSite, _: object, *, quiet: bool) -> None:
    """Where it is, and what it has."""
    size = terminal.megabytes(built.nbytes)
    found = f"{built.artifacts} artifacts, {built.files} files, {size}: {built.index}"
    terminal.out().print(terminal.clean(found))
    for error in built.unreachable:
        terminal.note(f"note: {error.message}")


def serve(built: BuiltSite, params: SiteParams, *, quiet: bool) -> None:
    """With `--serve`, answer until Ctrl-C, which is how it ends and no error."""
    if not params.serve:
        return
    with serving(built.output, params.port) as (url, server):
        terminal.note(f"Serving {url} on this machine only; Ctrl-C ends it.", quiet=quiet)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


def print_stored(stored: Stored, _: object, *, quiet: bool) -> None:
    """The table of `cache list`."""
    if not stored.artifacts:
        terminal.note(f"Nothing is stored in {stored.folder}. Fetch something: oscar-zoo pull NAME")
        return
    heads = ("ARTIFACT", "DIGEST", "SIZE", "FETCHED", "FROM", "PATH")
    table = terminal.table(*heads, right=(2,), spare=(("PATH",),))
    for row in stored.artifacts:
        cells = [
            row["reference"],
            row["digest"][:19],
            terminal.megabytes(row["bytes"]),
            row["fetched"][:10],
            row["source"],
            row["path"],
        ]
        table.add_row(*map(terminal.clean, cells))
    terminal.out().print(table)
    total = terminal.megabytes(stored.nbytes)
    count = terminal.counted(len(stored.artifacts), "artifact")
    terminal.out().print(f"{count}, {total} in {terminal.clean(stored.folder)}")


def print_checks(checks: CacheChecks, _: object, *, quiet: bool) -> None:
    """A line for each artifact of `cache verify`, and how to repair it."""
    for check in checks.artifacts:
        mark = terminal.MARKS["failed" if check.problem else "ok"]
        terminal.out().print(f"{mark}  {terminal.clean(check.reference or check.path)}")
        if check.problem:
            terminal.out().print(f"    {terminal.clean(check.problem)}")
            terminal.note(f"Next: {check.repair}")
    intact = sum(check.problem is None for check in checks.artifacts)
    terminal.out().print(
        f"{intact} of {terminal.counted(len(checks.artifacts), 'artifact')} intact"
    )


def print_freed(freed: Freed, _: object, *, quiet: bool) -> None:
    """A line for each thing that `cache gc` removed."""
    for item in freed.removed:
        terminal.out().print(f"{item.kind:<17} {terminal.clean(item.path)}")
    done = "would free" if freed.dry_run else "freed"
    count, room = (
        terminal.counted(len(freed.removed), "item"),
        terminal.megabytes(freed.freed_bytes),
    )
    terminal.out().print(f"{count}, {done} {room}")
    if not freed.exclusive:
        terminal.note("Others use the store just now: unused files younger than an hour stay.")


def print_removed(done: RemovedArtifacts, _: object, *, quiet: bool) -> None:
    """A line for each artifact that is gone."""
    for row in done.removed:
        terminal.out().print(f"Removed {terminal.clean(row['reference'])}  {row['digest']}")


def print_folder(found: CacheFolder, _: object, *, quiet: bool) -> None:
    """The folder alone, for programs of a shell."""
    click.echo(found.path)


def print_status(report: StatusReport, _: object, *, quiet: bool) -> None:
    """The status on each hub that has changed it, and why a later one has not."""
    for one in report.hubs:
        reference, place = terminal.clean(one.id.reference), terminal.clean(one.hub)
        verb = "Proposed" if one.proposal else "Now" if one.changed else "Already"
        reason = f": {one.status.reason}" if one.status.reason else ""
        state = f"{one.status.state}{terminal.clean(reason)}"
        terminal.out().print(f"{verb} {state}  {reference} on {place}")
        if one.proposal is not None:
            terminal.note(f"Next: ask its owner to merge {one.proposal}", quiet=quiet)
    terminal.print_failure(report.error)
