"""Log in to a hub with the hub's own client, and see whose token is used then.

Logins are made and kept by the clients; no token is stored or shown here. What they raise may hold
a request, and with it the token, so none of it leaves this module.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.outcome import says
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry.hubs import address, table
from oscar_zoo.registry.params import LoginParams

if TYPE_CHECKING:
    from oscar_zoo.registry.hubs.http import HttpReply

TITLE = table.HUBS["hf"].title
_WHOAMI_SECONDS = 8.0


@dataclass(frozen=True)
class Account:
    """What oscar-zoo login prints: who one is now."""

    hub: Literal["hf", "ms"]
    user: Annotated[str | None, says("Name there; null for a hub that does not say.")]
    source: Annotated[str, says("Name of the variable, or path of the file with the token.")]
    schema: Literal["oscar-zoo.login/1"] = "oscar-zoo.login/1"


def run(params: LoginParams, observer: Observer = SILENT) -> Account:
    """Log in to the hub, unless there is a login that it accepts.

    Hugging Face's client asks on the terminal and keeps the token; that of ModelScope comes from a
    variable only."""
    if params.hub == "hf":
        return _huggingface(observer, params.force)
    found = table.modelscope_credential()
    if found is None:
        raise errors.UsageError(
            "MODELSCOPE_API_TOKEN is not set; the login that ModelScope's client saves is a pickle"
            " and is never read.",
            hint="set the variable to a token of your ModelScope account",
        )
    return Account("ms", None, found.source)


def _huggingface(observer: Observer, force: bool) -> Account:
    before = table.huggingface_credential()
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        hint = "set HF_TOKEN to a token of your Hugging Face account"
        if before is not None:
            hint = f"none is needed: a token comes from {before.source}; check it: oscar-zoo doctor"
        raise errors.UsageError("a login needs a terminal.", hint=hint)
    user = whoami() if before is not None and not force else None
    if user is None:
        if before is not None and before.is_variable and not force:
            raise errors.LoginRequired(
                f"Hugging Face refuses the token in {before.source}, which wins over a login.",
                hint=f"unset or replace {before.source}",
            )
        _log_in()
        user = whoami()
    after = table.huggingface_credential()
    if user is None or after is None:
        raise errors.LoginRequired.for_hub(TITLE, sent_token=True)
    if force and after.is_variable:
        text = f"warning: {after.source} is set and wins over the login that was saved"
        observer.note(Note("login.hidden", text, {"source": after.source}, kind="step"))
    return Account("hf", user, after.source)


def whoami() -> str | None:
    from huggingface_hub import constants

    from oscar_zoo.registry.hubs.http import Transport
    from oscar_zoo.registry.hubs.huggingface import user_token

    limits = replace(address.Sources().network, tries=1)
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT

    def refusal(reply: HttpReply, sent_token: bool) -> Exception:
        return _refused(reply.status)

    hub = Transport(TITLE, endpoint, token=user_token, refusal=refusal, limits=limits)
    seconds = min(_WHOAMI_SECONDS, limits.read)
    try:
        reply = hub.get(f"{hub.endpoint}/api/whoami-v2", limit=1 << 20, seconds=seconds)
        return str(strict_json.loads(reply.body, what="the answer")["name"])
    except errors.LoginRequired:
        return None
    except (errors.MalformedFile, LookupError, TypeError):
        raise errors.HubUnreachable.for_hub(TITLE, "it does not say who this is") from None


def _log_in() -> None:
    """Run the dialogue of Hugging Face's client on this terminal; the client checks the token and
    saves it in its own file. What it prints goes to stderr, and what the hub did not accept is said
    in our words."""
    from huggingface_hub import login
    from huggingface_hub.errors import DeviceCodeError, HfHubHTTPError

    from oscar_zoo.registry.hubs.http import Failed, http_client, reached

    def dialogue() -> Exception | None:
        try:
            login(skip_if_logged_in=False)
        except HfHubHTTPError as error:
            return _refused(error.response.status_code)
        except DeviceCodeError:
            again = "run it again: oscar-zoo login"
            return errors.AccessError("Hugging Face did not confirm the login.", hint=again)
        except ValueError:
            own = "paste one of your own account"
            return errors.UsageError("Hugging Face takes no such token for a login.", hint=own)
        return None

    try:
        with contextlib.redirect_stdout(sys.stderr):
            refusal = reached(TITLE, http_client(), dialogue)
    except Failed as failed:
        refusal = failed.error
    if refusal is not None:
        raise refusal


def _refused(status: int) -> errors.OscarZooError:
    if status in (401, 403):
        return errors.LoginRequired.for_hub(TITLE, sent_token=True)
    return errors.HubUnreachable.for_hub(TITLE, f"it answers with status {status}")
