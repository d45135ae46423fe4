"""`oscar-zoo doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import click

from oscar_zoo.cli import options


@click.command("doctor")
@options.hubs_option
@options.offline_option
@options.json_option
def command(hubs: tuple[str, ...], offline: bool, as_json: bool) -> int:
    """Check hubs, versions, tokens, settings, disk, GPU and engine; takes ten seconds at most and
    changes nothing.

    Tokens are never shown, only where they come from. The exit code is 1 when a check FAILED. The
    last line says whether commands work all the same.

    \b
    Examples:
      oscar-zoo doctor
      oscar-zoo doctor --hub hf:Zhongzhu/OSCAR-RotationZoo
      oscar-zoo doctor --offline --json
    """
    from oscar_zoo.app.doctor import examine
    from oscar_zoo.cli.render.findings import emit_findings, print_findings

    found = examine(hubs, offline=offline)
    usable = not any(finding.essential and finding.state == "failed" for finding in found)
    (emit_findings if as_json else print_findings)(found, usable=usable)
    return 1 if any(finding.state == "failed" for finding in found) else 0
