"""`oscar-zoo doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("doctor")
@options.hubs_option
@options.offline_option
@options.json_option
def command(hubs: tuple[str, ...], offline: bool, as_json: bool) -> int:
    """Check hubs, versions, tokens, settings, disk, GPU and engine; takes ten seconds at most and
    changes nothing.

    Tokens are never shown, only where they come from. The exit code is 1 when something is broken
    that every command needs.

    \b
    Examples:
      oscar-zoo doctor
      oscar-zoo doctor --hub hf:Zhongzhu/OSCAR-RotationZoo
      oscar-zoo doctor --offline --json
    """
    from oscar_zoo.cli.health import examine

    found = examine(hubs, offline=offline)
    usable = not any(finding.essential and finding.state == "failed" for finding in found)
    if as_json:
        rows = [
            {"topic": f.topic, "name": f.name, "state": f.state, "detail": f.detail, "next": f.step}
            | dict(f.facts)
            for f in found
        ]
        terminal.emit_json({"schema": "oscar-zoo.doctor/1", "usable": usable, "findings": rows})
        return 0 if usable else 1
    console = terminal.out()
    for finding in found:
        word = "FAILED" if finding.state == "failed" else finding.state
        mark = terminal.MARKS[finding.state] + " " * (12 - len(word))
        console.print(
            f"{mark}{finding.topic:<8} {terminal.clean(finding.name)}:"
            f" {terminal.clean(finding.detail)}"
        )
        if finding.step is not None:
            console.print(f"{'':<12}next: {terminal.clean(finding.step)}")
    failed = sum(finding.state == "failed" for finding in found)
    terminal.note(
        ("Usable" if usable else "Not usable") + (f"; {failed} failed." if failed else ".")
    )
    return 0 if usable else 1
