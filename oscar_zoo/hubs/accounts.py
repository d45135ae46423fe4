"""Who the user is on the hubs. Logins are made and kept by the hubs' own clients; no token is
stored or shown here.

What the clients raise may hold a request, and with it the token, so none of it leaves this module.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from oscar_zoo.artifact import strict_json
from oscar_zoo.errors import (
    AccessError,
    HubUnreachable,
    LoginRequired,
    MalformedFile,
    OscarZooError,
    UsageError,
)
from oscar_zoo.hubs import config, table

if TYPE_CHECKING:
    from oscar_zoo.hubs.transport import HttpReply

TITLE = table.HUBS["hf"].title


def whoami() -> str | None:
    """The user's name on Hugging Face, or `None` without a token, or with one that the hub refuses.

    It takes a little longer than `network.answer` of the configuration at most.
    """
    from huggingface_hub import constants

    from oscar_zoo.hubs.huggingface import user_token
    from oscar_zoo.hubs.transport import Limits, Transport

    limits = replace(Limits(**config.load().network.model_dump(exclude_none=True)), tries=1)
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    hub = Transport(TITLE, endpoint, token=user_token, refusal=_refusal, limits=limits)
    try:
        reply = hub.get(f"{hub.endpoint}/api/whoami-v2", limit=1 << 20, budget=1.2 * limits.answer)
        name = strict_json.loads(reply.body, what="the answer")["name"]
    except LoginRequired:
        return None
    except (MalformedFile, LookupError, TypeError):
        raise HubUnreachable.for_hub(TITLE, "it does not say who this is") from None
    return str(name)


def login() -> None:
    """Run the dialogue of Hugging Face's client on this terminal; the client checks the token and
    saves it in its own file. What it prints goes to stderr.
    """
    from oscar_zoo.hubs.session import Failed, http_client, reached

    try:
        with contextlib.redirect_stdout(sys.stderr):
            refusal = reached(TITLE, http_client(), 1, _dialogue)
    except Failed as failed:
        refusal = failed.error
    if refusal is not None:
        raise refusal


def _dialogue() -> Exception | None:
    """Run the dialogue; what the hub did not accept, in our words."""
    from huggingface_hub import login as start_dialogue
    from huggingface_hub.errors import DeviceCodeError, HfHubHTTPError

    try:
        start_dialogue(skip_if_logged_in=False)
    except HfHubHTTPError as error:
        return _refused(error.response.status_code)
    except DeviceCodeError:
        return AccessError(
            "Hugging Face did not confirm the login.", hint="run it again: oscar-zoo login"
        )
    except ValueError:
        return UsageError(
            "Hugging Face takes no such token for a login.", hint="paste one of your own account"
        )
    return None


def _refusal(reply: HttpReply, sent_token: bool) -> OscarZooError:
    return _refused(reply.status)


def _refused(status: int) -> OscarZooError:
    if status in (401, 403):
        return LoginRequired.for_hub(TITLE, sent_token=True)
    return HubUnreachable.for_hub(TITLE, f"it answers with status {status}")
