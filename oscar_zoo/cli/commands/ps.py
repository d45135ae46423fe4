"""`oscar-zoo ps`: the servers that run, and those that ended by themselves."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.cli.render import terminal
from oscar_zoo.serving.params import PsParams


def _body(as_json: bool) -> int:
    """Without an observer, whose import would take most of the time."""
    from oscar_zoo.cli.render.servers import print_servers
    from oscar_zoo.serving.servers import ps
    from oscar_zoo.verb import as_json as plain

    report = ps()
    if as_json:
        terminal.emit_json(plain(report))
    else:
        print_servers(report)
    return 0


command = build.of_body("ps", PsParams, _body, quiet=False)
