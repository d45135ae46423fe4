"""Who the user is on the hubs. Logins are made and kept by the hubs' own clients; no token is
stored or shown here.

What the clients raise may hold a request, and with it the token, so none of it leaves this module.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.artifact import strict_json
from oscar_zoo.errors import (
    AccessError,
    HubUnreachable,
    LoginRequired,
    MalformedFile,
    OscarZooError,
    UsageError,
)
from oscar_zoo.hubs import config

if TYPE_CHECKING:
    from oscar_zoo.hubs.transport import HttpReply

TITLE = "Hugging Face"
_TRUE = ("1", "on", "yes", "true")
_VARIABLES = {
    "hf": ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "ms": ("MODELSCOPE_API_TOKEN",),
}


@dataclass(frozen=True)
class Credential:
    """Where the token of a hub comes from, never the token itself.

    Attributes:
        source: name of a variable, or path of the file that the hub's client wrote.
        is_variable: which of the two.
        exposed: whether other users of this machine can read it there.
    """

    source: str
    is_variable: bool
    exposed: bool = False


def credential(scheme: Literal["hf", "ms"]) -> Credential | None:
    """Where the token comes from that goes to a hub, in the order of the hub's client, or `None`.
    Asks nobody."""
    if (
        scheme == "hf"
        and os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").strip().lower() in _TRUE
    ):
        return None
    name = next((name for name in _VARIABLES[scheme] if os.environ.get(name, "").strip()), None)
    if name is not None:
        return Credential(name, is_variable=True)
    if scheme == "ms":  # its client keeps a login in a pickle, which nothing here reads
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")).expanduser()
    try:
        status = path.stat()
    except OSError:
        return None
    if not status.st_size:
        return None
    return Credential(
        str(path), is_variable=False, exposed=bool(stat.S_IMODE(status.st_mode) & 0o077)
    )


def whoami() -> str | None:
    """The user's name on Hugging Face, or `None` without a token, or with one that the hub refuses.

    It takes a little longer than `network.answer` of the configuration at most.

    Raises:
        NetworkError: the hub did not say.
        UsageError: the configuration is malformed.
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
    """The dialogue of Hugging Face's client, on this terminal; it checks the token and saves it in
    its own file.

    Raises:
        AccessError: the hub did not accept the login.
        NetworkError: the hub did not answer.
        UsageError: the token is of a kind that cannot log in.
    """
    from oscar_zoo.hubs.session import Failed, http_client, reached

    try:
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
