"""`oscar-zoo yank`: take a version back from everybody who asks by name. Needs no torch."""

from __future__ import annotations

from typing import Any

import click

from oscar_zoo.cli import completing, options


@click.command("yank")
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
    """Withdraw a version that must not be used.

    It is no longer found by name. Its bytes stay: who names its digest, or has locked it, still
    gets them, with the reason as a warning. Only the hub's index changes.

    \b
    Examples:
      oscar-zoo yank Qwen3-8B:seq512_prompt2_group128 --reason "calibrated on the test set"
      oscar-zoo yank Qwen3-8B@sha256:3f9a12b4c5d6 --reason "wrong layers" --hub hf:my-org/zoo
    """
    from oscar_zoo.app.status import StatusRequest
    from oscar_zoo.cli.status_change import change_status

    request = StatusRequest(name, "yanked", hubs, propose=create_pr, **details)
    return change_status(request, quiet=quiet, as_json=as_json)
