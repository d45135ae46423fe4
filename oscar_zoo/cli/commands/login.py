"""`oscar-zoo login`: the hub's own login, and who one is then. Nothing is stored by this
program."""

from __future__ import annotations

import contextlib
import sys

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("login")
@click.argument("hub", metavar="[hf|ms]", type=click.Choice(["hf", "ms"]), default="hf")
@click.option("--force", is_flag=True, help="Log in again, although there is a login.")
@options.json_option
def command(hub: str, force: bool, as_json: bool) -> None:
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
    user, source = _huggingface(force) if hub == "hf" else (None, _modelscope())
    if as_json:
        terminal.emit_json(
            {"schema": "oscar-zoo.login/1", "hub": hub, "user": user, "source": source}
        )
    elif hub == "hf":
        terminal.out().print(
            f"Logged in to Hugging Face as {terminal.clean(user)} ({terminal.clean(source)})"
        )
    else:
        terminal.out().print(f"ModelScope gets the token in {source}; nothing else is needed")


def _huggingface(force: bool) -> tuple[str, str]:
    """The user's name and where the token comes from, after the dialogue where it is needed."""
    from oscar_zoo.errors import LoginRequired, UsageError
    from oscar_zoo.hubs import accounts

    before = accounts.credential("hf")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        hint = "set HF_TOKEN to a token of your Hugging Face account"
        if before is not None:
            hint = f"none is needed: a token comes from {before.source}; check it: oscar-zoo doctor"
        raise UsageError("a login needs a terminal.", hint=hint)
    user = accounts.whoami() if before is not None and not force else None
    if user is None:
        if before is not None and before.is_variable and not force:
            raise LoginRequired(
                f"Hugging Face refuses the token in {before.source}, which wins over a login.",
                hint=f"unset or replace {before.source}",
            )
        with contextlib.redirect_stdout(sys.stderr):
            accounts.login()
        user = accounts.whoami()
    after = accounts.credential("hf")
    if user is None or after is None:
        raise LoginRequired.for_hub(accounts.TITLE, sent_token=True)
    if force and after.is_variable:
        terminal.note(f"warning: {after.source} is set and wins over the login that was saved")
    return user, after.source


def _modelscope() -> str:
    """The variable with the token; raises `UsageError` when it is not set."""
    from oscar_zoo.errors import UsageError
    from oscar_zoo.hubs import accounts

    found = accounts.credential("ms")
    if found is None:
        raise UsageError(
            "MODELSCOPE_API_TOKEN is not set; the login that ModelScope's client saves is a pickle"
            " and is never read.",
            hint="set the variable to a token of your ModelScope account",
        )
    return found.source
