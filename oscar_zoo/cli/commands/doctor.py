"""`oscar-zoo doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.serving.params import DoctorParams


def _body(as_json: bool, hubs: tuple[str, ...], offline: bool) -> int:
    from oscar_zoo.cli.render.findings import emit_findings, print_findings
    from oscar_zoo.serving.doctor import examine

    found = examine(hubs, offline=offline)
    usable = not any(finding.essential and finding.state == "failed" for finding in found)
    (emit_findings if as_json else print_findings)(found, usable=usable)
    return 1 if any(finding.state == "failed" for finding in found) else 0


command = build.of_body("doctor", DoctorParams, _body, quiet=False)
