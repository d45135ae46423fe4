"""The body that `yank`, `unyank` and `deprecate` share."""

from __future__ import annotations

from functools import partial

from oscar_zoo.app.status import StatusRequest, set_status
from oscar_zoo.cli.main import exit_code
from oscar_zoo.cli.render import writing
from oscar_zoo.cli.render.progress import TerminalObserver
from oscar_zoo.registry.writing import ignore


def change_status(request: StatusRequest, *, quiet: bool, as_json: bool) -> int:
    """Change the status on every hub and show it; returns the exit code."""
    show = ignore if as_json else partial(writing.print_status, quiet=quiet)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = set_status(request, observer, show)
    rows = [writing.status_row(written) for written in report.done]
    writing.emit_report("oscar-zoo.status/1", rows, report.error, as_json=as_json)
    return exit_code(report.error)
