"""`oscar-zoo deprecate`: advise against a version without withdrawing it. Needs no torch."""

from __future__ import annotations

from typing import Any

import click

from oscar_zoo.cli import completing, options


@click.command("deprecate")
@click.argument("name", metavar="NAME:TAG", shell_complete=completing.versions)
@options.reason_option
@options.replaced_by_option
@options.create_pr_option
@options.targets_option
@options.quiet_option
@options.json_option
def command(
    name: str, hubs: tuple[str, ...], create_pr: bool, quiet: bool, as_json: bool, **details: Any
) -> int:
    """Advise against a version: it is still found by name, with the reason as a warning.

    \b
    Examples:
      oscar-zoo deprecate Qwen3-8B:old --reason "there is a better one" --replaced-by Qwen3-8B:new
      oscar-zoo deprecate Qwen3-8B:old --reason "no longer maintained" --hub hf:my-org/zoo
    """
    from oscar_zoo.app.status import StatusRequest
    from oscar_zoo.cli.status_change import change_status

    request = StatusRequest(name, "deprecated", hubs, propose=create_pr, **details)
    return change_status(request, quiet=quiet, as_json=as_json)
