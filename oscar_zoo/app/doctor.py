"""What `doctor` finds: one finding per thing that can be right or wrong, none of them with a secret
in it.

Whatever may hang (hubs, the driver of the GPU) runs in parallel and ends within `SECONDS`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

from oscar_zoo import paths
from oscar_zoo.app import machine
from oscar_zoo.app.machine import DoctorFinding, counted
from oscar_zoo.errors import HubTimeout, NetworkError, OscarZooError, UsageError
from oscar_zoo.registry import login
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.http import is_nearby
from oscar_zoo.registry.hubs.table import HUBS, HubKind
from oscar_zoo.registry.hubs.threads import in_parallel, within

SECONDS = 8.0
"""The longest that anything here may take."""
_ENDPOINTS = tuple(name for kind in HUBS.values() for name in kind.endpoints)
_SETTINGS = (
    *(f"OSCAR_ZOO_{name}" for name in ("CACHE", "CONFIG", "DATA", "STATE", "HUB", "OFFLINE")),
    *_ENDPOINTS,
    *(
        "MODELSCOPE_PREFER_AI_SITE",
        "HF_HUB_OFFLINE",
        "HF_HOME",
        "HF_TOKEN_PATH",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    ),
    *(
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "https_proxy",
        "http_proxy",
        "all_proxy",
        "no_proxy",
    ),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Variables whose values are shown; no others are."""


def examine(hubs: Sequence[str] = (), *, offline: bool = False) -> list[DoctorFinding]:
    """Look at everything; takes little more than `SECONDS` at most, and changes nothing."""
    slow: list[Callable[[], DoctorFinding]] = []
    problem: OscarZooError | None = None
    try:
        configured = address.load(hubs, offline=offline)
    except OscarZooError as error:
        problem = error
    found = [*machine.versions(), *machine.folders(), *settings(problem)]
    if problem is None:
        slow += [partial(_hub, text, configured) for text in configured.read]
        slow += [
            partial(_token, kind, configured.offline) for kind in HUBS.values() if kind.credential
        ]
    found += in_parallel([*slow, machine.gpu], workers=len(slow) + 1)
    return [*found, *machine.engine()]


def settings(problem: OscarZooError | None = None) -> Iterator[DoctorFinding]:
    """What changes what commands do: the configuration, and variables without the credentials in
    their addresses.
    """
    path = paths.config_dir() / address.FILE_NAME
    there = path.exists()
    facts: dict[str, object] = {"path": str(path), "exists": there}
    if problem is not None:
        step = problem.hint
        yield DoctorFinding(
            "setting",
            address.FILE_NAME,
            "failed",
            masked(problem.message),
            step,
            essential=True,
            facts=facts,
        )
    else:
        yield DoctorFinding(
            "setting",
            address.FILE_NAME,
            "ok",
            str(path) if there else f"none at {path}",
            facts=facts,
        )
    for name in _SETTINGS:
        value = os.environ.get(name, "").strip()
        if not value:
            continue
        shown = masked(value)
        facts = {"value": shown}
        if name in _ENDPOINTS and not _is_safe(value):
            step = "use an https address"
            yield DoctorFinding(
                "setting",
                name,
                "warning",
                f"{shown}: no token is sent without TLS",
                step,
                facts=facts,
            )
        else:
            yield DoctorFinding("setting", name, "ok", shown, facts=facts)


def masked(text: str) -> str:
    """`text` without what may be a secret: user, password and query of an address, and what looks
    like a token."""
    text = re.sub(r"(^|//|[\s,'\"])[^/\s,'\"@]*@", r"\1***@", text)
    text = re.sub(r"(://[^\s?#]*)[?#]\S*", r"\1?***", text)
    return re.sub(r"\b(hf_|ms-)[A-Za-z0-9-]{8,}", r"\1***", text)


def _is_safe(endpoint: str) -> bool:
    """Whether an endpoint is of a kind that tokens are sent to: TLS, or this machine."""
    parts = urlsplit(endpoint if "//" in endpoint else f"https://{endpoint}")
    return parts.scheme.lower() == "https" or is_nearby(endpoint)


def _hub(text: str, configured: address.HubSettings) -> DoctorFinding:
    """Whether a hub answers, how fast, and how many artifacts it has."""
    title = masked(text)
    if configured.offline and address.is_remote(text):
        return DoctorFinding(
            "hub", title, "not checked", "offline mode", facts={"hub": title, "reachable": None}
        )
    start = time.monotonic()
    try:
        hub = address.open_hub(text, network=configured.network)
        late = HubTimeout.for_hub(hub.title, f"did not answer within {SECONDS:.0f} s")
        count = len(within(SECONDS, hub.artifacts, error=lambda: late))
    except OscarZooError as error:
        facts = {
            "hub": title,
            "reachable": not isinstance(error, NetworkError),
            "error": error.code,
        }
        # What is no hub may be anything, a token too: it is not repeated.
        detail = "not a hub" if isinstance(error, UsageError) else masked(error.message)
        return DoctorFinding("hub", title, "failed", detail, error.hint, facts=facts)
    milliseconds = round(1000 * (time.monotonic() - start))
    facts = {"hub": title, "reachable": True, "milliseconds": milliseconds, "artifacts": count}
    return DoctorFinding(
        "hub", title, "ok", f"{counted(count)}, answered in {milliseconds} ms", facts=facts
    )


def _token(kind: HubKind, offline: bool) -> DoctorFinding:
    """Whether there is a token, from where, and whose it is if the hub says so."""
    title, found = kind.title, kind.credential() if kind.credential else None
    facts = {
        "hub": kind.scheme,
        "present": found is not None,
        "source": found.source if found else None,
    }
    if found is None:
        step = f"{kind.token_step}, to publish there"
        return DoctorFinding(
            "token", title, "ok", "none; public zoos are read without", step, facts=facts
        )
    if found.exposed:
        detail, step = f"in {found.source}, which other users can read", f"chmod 600 {found.source}"
        return DoctorFinding("token", title, "warning", detail, step, facts=facts)
    if not kind.tells_user or offline:
        return DoctorFinding("token", title, "ok", f"from {found.source}", facts=facts)
    late = HubTimeout.for_hub(title, f"did not say within {SECONDS:.0f} s whose it is")
    try:
        user = within(SECONDS, login.whoami, error=lambda: late)
    except OscarZooError as error:
        detail = f"from {found.source}; {masked(error.message)}"
        return DoctorFinding("token", title, "not checked", detail, error.hint, facts=facts)
    if user is None:
        step = f"replace or unset {found.source}" if found.is_variable else kind.token_step
        return DoctorFinding(
            "token", title, "failed", f"from {found.source}; {title} refuses it", step, facts=facts
        )
    return DoctorFinding(
        "token", title, "ok", f"from {found.source}, of {user}", facts=facts | {"user": user}
    )
