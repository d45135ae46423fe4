"""`oscar-zoo completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

import click

PROGRAM = "oscar-zoo"


@click.command("completion")
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell; it asks this program what fits.

    \b
    Examples:
      oscar-zoo completion bash > ~/.local/share/bash-completion/completions/oscar-zoo
      oscar-zoo completion zsh > "${fpath[1]}/_oscar-zoo"
      oscar-zoo completion fish > ~/.config/fish/completions/oscar-zoo.fish
    """
    from click.shell_completion import get_completion_class

    from oscar_zoo.cli.completing import register
    from oscar_zoo.cli.main import COMPLETION_VARIABLE, cli

    register()
    kind = get_completion_class(shell)
    assert kind is not None  # click brings all three
    click.echo(kind(cli, {}, PROGRAM, COMPLETION_VARIABLE).source())
