"""What `doctor` shows."""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.cli.render import terminal
from oscar_zoo.serving.doctor import DoctorFinding

_MARK = 12
"""Columns of the state of a finding."""


def emit_findings(found: Sequence[DoctorFinding], *, usable: bool) -> None:
    """The JSON of `doctor`."""
    rows = [
        {"topic": f.topic, "name": f.name, "state": f.state, "detail": f.detail, "next": f.step}
        | dict(f.facts)
        for f in found
    ]
    terminal.emit_json({"schema": "oscar-zoo.doctor/1", "usable": usable, "findings": rows})


def print_findings(found: Sequence[DoctorFinding], *, usable: bool) -> None:
    """A line for each finding, and what to do about it."""
    for finding in found:
        word = "FAILED" if finding.state == "failed" else finding.state
        rest = f"{' ' * (_MARK - len(word))}{finding.topic:<8} "
        terminal.labelled(
            terminal.MARKS[finding.state] + rest,
            f"{finding.name}: {finding.detail}",
            plain_label=word + rest,
        )
        if finding.step is not None:
            terminal.labelled(" " * _MARK, f"next: {finding.step}")
    failed = sum(finding.state == "failed" for finding in found)
    result = "Usable" if usable else "Not usable"
    terminal.note(result + (f"; {failed} failed." if failed else "."))
