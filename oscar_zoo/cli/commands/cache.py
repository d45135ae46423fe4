"""`oscar-zoo cache`: look at the local store, check it, and give its disk back. Needs no torch and
asks no hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.registry.record import Record
    from oscar_zoo.registry.store import Store


@click.group("cache")
def command() -> None:
    """Look after the artifacts that were pulled: list, check, remove, free space.

    \b
    Examples:
      oscar-zoo cache list
      oscar-zoo cache verify
      oscar-zoo cache rm Qwen3-8B:seq20000_prompt83_group128
      oscar-zoo cache gc --dry-run
    """


@command.command("list", short_help="Show what is stored, and how much room it takes.")
@options.json_option
def list_command(as_json: bool) -> None:
    """Show what is stored, from where, and how much room it takes.

    \b
    Examples:
      oscar-zoo cache list
      oscar-zoo cache list --json
    """
    from oscar_zoo.registry.store import Store

    store = Store()
    rows = [_row(record) for record in store.installed()]
    total = sum(row["bytes"] for row in rows)
    if as_json:
        facts = {"folder": str(store.root), "artifacts": rows, "bytes": total}
        terminal.emit_json({"schema": "oscar-zoo.cache-list/1"} | facts)
        return
    if not rows:
        terminal.note(f"Nothing is stored in {store.root}. Fetch something: oscar-zoo pull NAME")
        return
    where = (
        () if terminal.is_narrow(200) else ("PATH",)
    )  # paths are there to be copied: leave them out before they wrap
    table = terminal.table("ARTIFACT", "DIGEST", "SIZE", "FETCHED", "FROM", *where, right=(2,))
    for row in rows:
        cells = [
            row["reference"],
            row["digest"][:19],
            terminal.megabytes(row["bytes"]),
            row["fetched"][:10],
            row["source"],
        ]
        table.add_row(*map(terminal.clean, [*cells, row["path"]][: len(table.columns)]))
    terminal.out().print(table)
    terminal.out().print(
        f"{_count(len(rows), 'artifact')}, {terminal.megabytes(total)} in"
        f" {terminal.clean(store.root)}"
    )


@command.command("verify", short_help="Hash and verify every stored artifact again.")
@options.json_option
def verify_command(as_json: bool) -> int:
    """Hash every stored file again and verify every artifact; exit code 4 if one is damaged.

    \b
    Examples:
      oscar-zoo cache verify
      oscar-zoo cache verify --json
    """
    from oscar_zoo.registry.gc import is_rotten
    from oscar_zoo.registry.store import Store

    store = Store()
    rows = [_checked(store, record) for record in store.installed()]
    for entry in filter(is_rotten, store.entry_folders()):
        repair = "oscar-zoo cache gc, then pull what is missing"
        unknown = dict.fromkeys(("id", "reference", "digest"))
        rows.append(
            unknown | {"path": str(entry), "problem": "its record cannot be read", "repair": repair}
        )
    damaged = [row for row in rows if row["problem"] is not None]
    if as_json:
        terminal.emit_json(
            {"schema": "oscar-zoo.cache-verify/1", "ok": not damaged, "artifacts": rows}
        )
        return 4 if damaged else 0
    for row in rows:
        mark = terminal.MARKS["failed" if row["problem"] else "ok"]
        terminal.out().print(f"{mark}  {terminal.clean(row['reference'] or row['path'])}")
        if row["problem"]:
            terminal.out().print(f"    {terminal.clean(row['problem'])}")
            terminal.note(f"Next: {row['repair']}")
    terminal.out().print(f"{len(rows) - len(damaged)} of {_count(len(rows), 'artifact')} intact")
    return 4 if damaged else 0


@command.command("gc", short_help="Remove what no stored artifact needs.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@options.json_option
def gc_command(dry_run: bool, as_json: bool) -> None:
    """Remove what no stored artifact needs: unused files, leftovers of killed processes, old
    listings of hubs.

    \b
    Examples:
      oscar-zoo cache gc --dry-run
      oscar-zoo cache gc
    """
    from oscar_zoo.registry.gc import gc
    from oscar_zoo.registry.store import Store

    report = gc(Store(), dry_run=dry_run)
    rows = [
        {"kind": item.kind, "path": str(item.path), "bytes": sum(file.size for file in item.files)}
        for item in report.removed
    ]
    if as_json:
        facts = {
            "dry_run": dry_run,
            "removed": rows,
            "freed_bytes": report.freed,
            "exclusive": report.exclusive,
        }
        terminal.emit_json({"schema": "oscar-zoo.cache-gc/1"} | facts)
        return
    for row in rows:
        terminal.out().print(f"{row['kind']:<17} {terminal.clean(row['path'])}")
    done = "would free" if dry_run else "freed"
    terminal.out().print(f"{_count(len(rows), 'item')}, {done} {terminal.megabytes(report.freed)}")
    if not report.exclusive:
        terminal.note("Others use the store just now: unused files younger than an hour stay.")


@command.command("rm", short_help="Remove artifacts from the store.")
@click.argument(
    "names", metavar="NAME[:TAG]...", nargs=-1, required=True, shell_complete=completing.stored
)
@options.json_option
def rm_command(names: tuple[str, ...], as_json: bool) -> None:
    """Remove artifacts from the store. They can be pulled again as long as a hub has them.

    \b
    Examples:
      oscar-zoo cache rm Qwen3-8B
      oscar-zoo cache rm Qwen3-8B:seq20000_prompt83_group128 Qwen3-4B@sha256:3f9a12b4c5d6
    """
    from oscar_zoo.registry.store import Store

    store = Store()
    records = {record.path: record for record in (_stored(store, name) for name in names)}
    for record in records.values():
        store.remove(record)
    rows = [_row(record) for record in records.values()]
    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.cache-rm/1", "removed": rows})
        return
    for row in rows:
        terminal.out().print(f"Removed {terminal.clean(row['reference'])}  {row['digest']}")


@command.command("dir", short_help="Print the folder of the store.")
@options.json_option
def dir_command(as_json: bool) -> None:
    """Print the folder of the store; the variable OSCAR_ZOO_CACHE moves it.

    \b
    Examples:
      oscar-zoo cache dir
      du -sh "$(oscar-zoo cache dir)"
    """
    from oscar_zoo import paths

    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.cache-dir/1", "path": str(paths.cache_dir())})
    else:
        click.echo(paths.cache_dir())


def _row(record: Record) -> dict[str, Any]:
    return {
        "id": str(record.id),
        "reference": record.id.reference,
        "digest": record.digest,
        "bytes": sum(file.size for file in record.files),
        "source": record.source,
        "revision": record.revision,
        "fetched": record.fetched,
        "path": str(record.path),
    }


def _checked(store: Store, record: Record) -> dict[str, Any]:
    """What hashing and verifying an entry says of it."""
    from oscar_zoo.artifact.outcome import Verified, why
    from oscar_zoo.errors import IntegrityError
    from oscar_zoo.registry.pull import verify_stored

    problem = None
    try:
        outcome = verify_stored(store.open(record.digest, record.id))
        if not isinstance(outcome, Verified):
            problem = why(outcome)
    except IntegrityError as error:
        problem = error.message
    reference = record.id.reference
    facts = {
        "id": str(record.id),
        "reference": reference,
        "digest": record.digest,
        "path": str(record.path),
    }
    return facts | {
        "problem": problem,
        "repair": f"oscar-zoo pull {reference}" if problem else None,
    }


def _stored(store: Store, name: str) -> Record:
    """The record of what `name` means; raises `ArtifactNotFound`."""
    from oscar_zoo.app.targets import parse_name
    from oscar_zoo.errors import ArtifactNotFound
    from oscar_zoo.registry.known_names import find_stored

    record = find_stored(parse_name(name).reference, store)
    if record is None:
        raise ArtifactNotFound(
            f"{name} is not in the store.", hint="oscar-zoo cache list shows what is"
        )
    return record


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
