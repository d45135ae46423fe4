"""What `pull` shows: artifacts that are here now, or that would be fetched or computed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from oscar_zoo.app.compute_plan import ComputePlan
from oscar_zoo.app.pull_request import Offered, Pulled, PullReport
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.pasting import pasted, serving
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.computing import computed_facts, plan_sentence
from oscar_zoo.errors import OscarZooError
from oscar_zoo.verb import as_json


def emit_report(report: PullReport, *, dry_run: bool) -> None:
    """Print the one JSON object of `pull`."""
    errors = [result for result in report.results if isinstance(result, OscarZooError)]
    done = [result for result in report.results if not isinstance(result, OscarZooError)]
    facts = {
        "dry_run": dry_run,
        "artifacts": [_row(result, dry_run=dry_run) for result in done],
        "errors": [terminal.error_facts(error) for error in errors],
        "new_lock": str(report.new_lock) if report.new_lock else None,
    }
    terminal.emit_json({"schema": "oscar-zoo.pull/1"} | facts)


def print_report(report: PullReport, *, dry_run: bool, quiet: bool) -> None:
    """Print every result for people, the failed ones last."""
    for result in report.results:
        if isinstance(result, OscarZooError):
            continue
        row = _row(result, dry_run=dry_run)
        if dry_run or not isinstance(result, Pulled):
            _print_planned(row)
            continue
        signature = result.result.signature
        told = signature.state in ("valid", "unknown_key", "not_checked")
        _print_pulled(row, signature.sentence if told else None, quiet=quiet)
    if report.new_lock is not None:
        place = _place(report.new_lock)
        text = f"note: pinned in {place}; commit it, or pull with --no-lock to do without"
        terminal.note(text, quiet=quiet)
    for error in report.results:
        if isinstance(error, OscarZooError):
            terminal.print_error(error.code, error.message, error.hint, as_json=False)


def _place(path: str | Path) -> str:
    """A path as seen from the current folder."""
    return path_text(Path(os.path.relpath(path)))


def _row(result: Pulled | Offered | ComputePlan, *, dry_run: bool) -> dict[str, Any]:
    if isinstance(result, ComputePlan):
        return _plan_row(result)
    if isinstance(result, Offered):
        return _offered_row(result)
    row = _pulled_row(result) | computed_facts(result.computed)
    if result.output is not None:
        row["output"] = str(result.output)
    return row | {"files": [], "bytes": 0} if dry_run else row


def _pulled_row(pulled: Pulled) -> dict[str, Any]:
    result = pulled.result
    record, manifest = result.artifact.record, result.artifact.manifest
    return {
        "id": str(record.id),
        "digest": record.digest,
        "path": str(record.path),
        "base_model": manifest.model.id if manifest else None,
        "already_present": result.already_present,
        "level": result.level,
        "warnings": list(result.warnings),
        "first_use": result.first_use,
        "hub": result.hub,
        "pinned_by": None if result.pinned_by is None else str(result.pinned_by),
        "revision": record.revision,
        "notes": list(result.notes),
        "computed": False,
        "signature": as_json(result.signature),
    }


def _offered_row(offered: Offered) -> dict[str, Any]:
    files = [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in offered.files]
    return {
        "id": offered.id,
        "digest": offered.digest,
        "already_present": offered.already_present,
        "warnings": list(offered.warnings),
        "hub": offered.hub,
        "revision": offered.revision,
        "computed": False,
        "files": files,
        "bytes": sum(file.size for file in offered.files),
    }


def _plan_row(plan: ComputePlan) -> dict[str, Any]:
    return {
        "id": None,
        "model": plan.choice.source,
        "digest": None,
        "already_present": False,
        "computed": True,
        "files": [],
        "warnings": [],
        "notes": [note.text for note in plan.notes],
        "bytes": 0,
        "estimated_seconds": plan.seconds,
        "plan": plan_sentence(plan.facts),
    }


def _print_pulled(row: dict[str, Any], signed: str | None, *, quiet: bool) -> None:
    """One artifact that is here now; `signed` says by whom."""
    console = terminal.out()
    reference = str(row["id"]).replace("/", ":", 1)
    for text in row["notes"]:
        terminal.note(f"note: {text}", quiet=quiet)
    if row["computed"]:
        console.print(f"Computed {terminal.clean(reference)}  {row['digest']}")
        console.print(f"verified to level {row['level']}; kept in {terminal.clean(row['path'])}")
    elif row["already_present"]:
        console.print(f"Already here and intact: {terminal.clean(reference)}  {row['digest']}")
        _print_not_asked(row)
    else:
        commit = f" @ {row['revision'][:7]}" if row["revision"] else ""
        console.print(
            f"Pulled {terminal.clean(reference)} from {terminal.clean(row['hub'] + commit)} "
            f" {row['digest']}"
        )
        console.print(f"verified to level {row['level']}; kept in {terminal.clean(row['path'])}")
    if signed is not None:
        terminal.note(signed, quiet=quiet)
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


def _print_not_asked(row: dict[str, Any]) -> None:
    """Why a hub that was named had no say, where a lock file pins what is here."""
    if row.get("pinned_by"):
        lock = terminal.clean(_place(row["pinned_by"]))
        terminal.out().print(f"no hub was asked, because {lock} pins it")


def _print_planned(row: dict[str, Any]) -> None:
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
        _print_not_asked(row)
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
