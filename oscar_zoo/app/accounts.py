"""Log in to a hub with the hub's own client, and see whose token is used then."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.app.progress import Note, Observer
from oscar_zoo.errors import LoginRequired, UsageError
from oscar_zoo.hubs import accounts
from oscar_zoo.hubs.credentials import Credential
from oscar_zoo.hubs.table import HUBS


@dataclass(frozen=True)
class Account:
    """Who one is on a hub.

    Attributes:
        hub: scheme of the hub.
        user: name there, or `None` for a hub that does not say.
        source: where the token comes from.
    """

    hub: str
    user: str | None
    source: str


def login(hub: str, observer: Observer, *, force: bool, at_terminal: bool) -> Account:
    """Log in to the hub with the scheme `hub`, unless there is a login that it accepts.

    Args:
        hub: `hf`, whose client asks on the terminal and keeps the token, or `ms`, whose token comes
            from a variable only.
    """
    return _huggingface(observer, force, at_terminal) if hub == "hf" else _modelscope()


def _huggingface(observer: Observer, force: bool, at_terminal: bool) -> Account:
    before = _credential("hf")
    if not at_terminal:
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
        accounts.login()
        user = accounts.whoami()
    after = _credential("hf")
    if user is None or after is None:
        raise LoginRequired.for_hub(accounts.TITLE, sent_token=True)
    if force and after.is_variable:
        text = f"warning: {after.source} is set and wins over the login that was saved"
        observer.note(Note("login.hidden", text, {"source": after.source}, kind="step"))
    return Account("hf", user, after.source)


def _modelscope() -> Account:
    found = _credential("ms")
    if found is None:
        raise UsageError(
            "MODELSCOPE_API_TOKEN is not set; the login that ModelScope's client saves is a pickle"
            " and is never read.",
            hint="set the variable to a token of your ModelScope account",
        )
    return Account("ms", None, found.source)


def _credential(hub: str) -> Credential | None:
    find = HUBS[hub].credential
    return find() if find is not None else None
