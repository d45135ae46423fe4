"""What `doctor` shows."""

from __future__ import annotations

from oscar_zoo.cli.render import terminal
from oscar_zoo.serving.doctor import DoctorReport

_MARK = 12
"""Columns of the state of a finding."""


def print_findings(report: DoctorReport, _params: object, *, quiet: bool) -> None:
    """A line for each finding, and what to do about it."""
    for finding in report.findings:
        word = "FAILED" if finding.state == "failed" else finding.state
        rest = f"{' ' * (_MARK - len(word))}{finding.topic:<8} "
        terminal.labelled(
            terminal.MARKS[finding.state] + rest,
            f"{finding.name}: {finding.detail}",
            plain_label=word + rest,
        )
        if finding.step is not None:
            terminal.labelled(" " * _MARK, f"next: {finding.step}")
    many = sum(finding.state == "failed" for finding in report.findings)
    result = "Usable" if report.usable else "Not usable"
    terminal.note(result + (f"; {many} failed." if many else "."))


def failed(report: DoctorReport, _params: object, *, quiet: bool) -> int:
    return int(any(finding.state == "failed" for finding in report.findings))
