"""`oscar-zoo login`: the hub's own login, and who one is then. Nothing is stored by this
program."""

from __future__ import annotations

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("login")
@click.argument("hub", metavar="[hf|ms]", type=click.Choice(["hf", "ms"]), default="hf")
@click.option("--force", is_flag=True, help="Log in again, although there is a login.")
@options.quiet_option
@options.json_option
def command(hub: str, force: bool, quiet: bool, as_json: bool) -> None:
    """Log in to Hugging Face (hf) with the dialogue of its own client, which checks and keeps the
    token.

    Reading public zoos needs no login. Without a terminal, set HF_TOKEN. ModelScope (ms) takes its
    token from MODELSCOPE_API_TOKEN only.

    \b
    Examples:
      oscar-zoo login
      oscar-zoo login --force
      oscar-zoo login ms
    """
    from oscar_zoo.app.accounts import login
    from oscar_zoo.cli.render.progress import TerminalObserver, can_ask

    account = login(hub, TerminalObserver(quiet=quiet), force=force, at_terminal=can_ask())
    if as_json:
        facts = {"hub": account.hub, "user": account.user, "source": account.source}
        terminal.emit_json({"schema": "oscar-zoo.login/1"} | facts)
    elif account.user is not None:
        user, source = terminal.clean(account.user), terminal.clean(account.source)
        terminal.out().print(f"Logged in to Hugging Face as {user} ({source})")
    else:
        terminal.out().print(
            f"ModelScope gets the token in {account.source}; nothing else is needed"
        )
