"""What `pull` shows: artifacts that are here now, or that would be fetched or computed."""

from __future__ import annotations

import os
from pathlib import Path

from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.pasting import pasted, serving
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.fetch import PullResult
from oscar_zoo.registry.params import PullParams
from oscar_zoo.registry.pull import Offered, Planned, PullReport


def print_report(report: PullReport, params: PullParams, *, quiet: bool) -> None:
    """Print every result for people, the failed ones last."""
    for result in report.artifacts:
        if isinstance(result, Planned):
            _print_planned(result)
        elif isinstance(result, Offered):
            _print_offered(result)
        elif report.dry_run:
            _print_here(result, "Already here")
        else:
            _print_pulled(result, quiet=quiet)
    if report.new_lock is not None:
        place = _place(report.new_lock)
        text = f"note: pinned in {place}; commit it, or pull with --no-lock to do without"
        terminal.note(text, quiet=quiet)
    for error in report.errors:
        terminal.print_failure(error)


def _place(path: Path) -> str:
    return path_text(Path(os.path.relpath(path)))


def _print_here(result: PullResult, words: str) -> None:
    """What is here, and why a hub that was named had no say where a lock file pins it."""
    console, record = terminal.out(), result.artifact.record
    console.print(f"{words}: {terminal.clean(record.id.reference)}  {record.digest}")
    if result.pinned_by is not None:
        lock = terminal.clean(_place(result.pinned_by))
        console.print(f"no hub was asked, because {lock} pins it")


def _print_pulled(result: PullResult, *, quiet: bool) -> None:
    console, record = terminal.out(), result.artifact.record
    reference = record.id.reference
    for text in result.notes:
        terminal.note(f"note: {text}", quiet=quiet)
    if result.already_present and not result.computed:
        _print_here(result, "Already here and intact")
    else:
        commit = f" @ {record.revision[:7]}" if record.revision else ""
        name, place = terminal.clean(reference), terminal.clean(result.hub + commit)
        done = f"Computed {name}" if result.computed else f"Pulled {name} from {place}"
        console.print(f"{done}  {record.digest}")
        place = terminal.clean(str(record.path))
        console.print(f"verified to level {result.level}; kept in {place}")
    if result.signature.state in ("valid", "unknown_key", "not_checked"):
        terminal.note(result.signature.sentence, quiet=quiet)
    if result.first_use:
        text = "first use: nobody vouches for this digest; it is pinned from now on"
        terminal.note(text, quiet=quiet)
    for warning in result.warnings:
        terminal.note(f"warning: {warning_text(warning)}", quiet=quiet)
    if result.output is not None:
        output = terminal.clean(str(result.output))
        console.print(f"Copied to {output}  for OSCAR scripts: ROT_DIR={output}")
    if result.report is not None:
        terminal.note(f"Report: {result.report}", quiet=quiet)
    if result.model is not None and Path(result.model).is_dir():
        again = f"oscar-zoo serve {reference} --model {pasted(result.model)}"
        terminal.note(f"Next: {again}", quiet=quiet)
    else:
        manifest = result.artifact.manifest
        model = manifest.model.id if manifest else record.id.model
        terminal.note(serving(reference, model), quiet=quiet)


def _print_planned(planned: Planned) -> None:
    model, plan = terminal.clean(planned.model), terminal.clean(planned.plan)
    terminal.out().print(f"Would compute one for {model} from {plan}")
    for note in planned.notes:
        terminal.note(f"note: {note}")


def _print_offered(offered: Offered) -> None:
    console = terminal.out()
    reference = terminal.clean(offered.id.replace("/", ":", 1))
    if offered.already_present:
        console.print(f"Already here: {reference}  {offered.digest}")
        return
    size = terminal.megabytes(sum(file.size for file in offered.files))
    hub = terminal.clean(offered.hub)
    console.print(f"Would fetch {reference} from {hub}, {len(offered.files)} files, {size}")
    for file in offered.files:
        path, size = terminal.clean(file.path), terminal.megabytes(file.size)
        console.print(f"  {path}  {size}  sha256 {file.sha256 or terminal.NOT_REPORTED}")
    for warning in offered.warnings:
        terminal.note(f"warning: {warning}")
