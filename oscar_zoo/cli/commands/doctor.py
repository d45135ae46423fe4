"""`oscar-zoo doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.cli.render import terminal
from oscar_zoo.serving.params import DoctorParams


def _body(as_json: bool, hubs: tuple[str, ...], offline: bool) -> int:
    from oscar_zoo.cli.render.findings import print_findings
    from oscar_zoo.serving.doctor import DoctorReport, examine
    from oscar_zoo.verb import as_json as plain

    report = DoctorReport(examine(hubs, offline=offline))
    if as_json:
        terminal.emit_json(plain(report))
    else:
        print_findings(report)
    return int(any(finding.state == "failed" for finding in report.findings))


command = build.of_body("doctor", DoctorParams, _body, quiet=False)
