"""What the `cache` commands show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_zoo.app.cache import Stored, StoredCheck
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.gc import GcReport
from oscar_zoo.registry.store import Record


def record_row(record: Record) -> dict[str, Any]:
    """One stored artifact as JSON."""
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


def emit_stored(stored: Stored) -> None:
    """The JSON of `cache list`."""
    rows = [record_row(record) for record in stored.records]
    facts = {"folder": str(stored.folder), "artifacts": rows}
    facts["bytes"] = sum(row["bytes"] for row in rows)
    terminal.emit_json({"schema": "oscar-zoo.cache-list/1"} | facts)


def print_stored(stored: Stored) -> None:
    """The table of `cache list`."""
    if not stored.records:
        terminal.note(f"Nothing is stored in {stored.folder}. Fetch something: oscar-zoo pull NAME")
        return
    heads = ("ARTIFACT", "DIGEST", "SIZE", "FETCHED", "FROM", "PATH")
    table = terminal.table(*heads, right=(2,), spare=(("PATH",),))
    rows = [record_row(record) for record in stored.records]
    for row in rows:
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
    total = terminal.megabytes(sum(row["bytes"] for row in rows))
    terminal.out().print(
        f"{_count(len(rows), 'artifact')}, {total} in {terminal.clean(stored.folder)}"
    )


def emit_checks(checks: Sequence[StoredCheck]) -> None:
    """The JSON of `cache verify`."""
    rows = [
        {
            "id": str(check.record.id) if check.record else None,
            "reference": check.record.id.reference if check.record else None,
            "digest": check.record.digest if check.record else None,
            "path": str(check.path),
            "problem": check.problem,
            "repair": check.repair,
        }
        for check in checks
    ]
    intact = all(check.problem is None for check in checks)
    terminal.emit_json({"schema": "oscar-zoo.cache-verify/1", "ok": intact, "artifacts": rows})


def print_checks(checks: Sequence[StoredCheck]) -> None:
    """A line for each artifact of `cache verify`, and how to repair it."""
    for check in checks:
        mark = terminal.MARKS["failed" if check.problem else "ok"]
        what = check.record.id.reference if check.record else check.path
        terminal.out().print(f"{mark}  {terminal.clean(what)}")
        if check.problem:
            terminal.out().print(f"    {terminal.clean(check.problem)}")
            terminal.note(f"Next: {check.repair}")
    intact = sum(check.problem is None for check in checks)
    terminal.out().print(f"{intact} of {_count(len(checks), 'artifact')} intact")


def emit_collected(report: GcReport, *, dry_run: bool) -> None:
    """The JSON of `cache gc`."""
    facts = {
        "dry_run": dry_run,
        "removed": [
            {
                "kind": item.kind,
                "path": str(item.path),
                "bytes": sum(file.size for file in item.files),
            }
            for item in report.removed
        ],
        "freed_bytes": report.freed,
        "exclusive": report.exclusive,
    }
    terminal.emit_json({"schema": "oscar-zoo.cache-gc/1"} | facts)


def print_collected(report: GcReport, *, dry_run: bool) -> None:
    """A line for each thing that `cache gc` removed."""
    for item in report.removed:
        terminal.out().print(f"{item.kind:<17} {terminal.clean(item.path)}")
    done, freed = "would free" if dry_run else "freed", terminal.megabytes(report.freed)
    terminal.out().print(f"{_count(len(report.removed), 'item')}, {done} {freed}")
    if not report.exclusive:
        text = "Others use the store just now: unused files younger than an hour stay."
        terminal.note(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
