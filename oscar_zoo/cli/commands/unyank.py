"""`oscar-zoo unyank`: offer a withdrawn or deprecated version again. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options


@click.command("unyank")
@click.argument("name", metavar="NAME:TAG", shell_complete=completing.versions)
@options.create_pr_option
@options.targets_option
@options.quiet_option
@options.json_option
def command(name: str, hubs: tuple[str, ...], create_pr: bool, quiet: bool, as_json: bool) -> int:
    """Offer a version again that was yanked or deprecated.

    \b
    Examples:
      oscar-zoo unyank Qwen3-8B:seq512_prompt2_group128
      oscar-zoo unyank Qwen3-8B:seq512_prompt2_group128 --hub hf:my-org/zoo
    """
    from oscar_zoo.app.status import StatusRequest
    from oscar_zoo.cli.status_change import change_status

    request = StatusRequest(name, "active", hubs, propose=create_pr)
    return change_status(request, quiet=quiet, as_json=as_json)
