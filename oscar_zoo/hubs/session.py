"""The HTTP client that huggingface_hub set up, and its exceptions in our words.

Version 1 of huggingface_hub brings httpx, version 2 httpx2: one interface, two sets of exception
classes. They are looked up from the client that is there, so neither library is imported here.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from oscar_zoo.errors import (
    HubTimeout,
    HubUnreachable,
    LoginRequired,
    OfflineError,
    OscarZooError,
    UnusableEnvironment,
)

T = TypeVar("T")
QUICK_SECONDS = 2.0
"""A connection that fails faster than this is tried once more."""
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
_NO_PROXY = "NO_PROXY"
_IPV6 = re.compile(
    r"(\[(?P<inner>[0-9a-fA-F:.]+)\](:(?P<port>\d+))?|(?P<bare>[0-9a-fA-F.]*:[0-9a-fA-F:.]+))"
    r"(?P<range>/\d+)?"
)
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Failed(Exception):
    """One try of a request that failed.

    Args:
        error: what to raise if this was the last try.
        tries: how many tries the failure may take.
        wait: seconds that the hub asks to wait.
    """

    def __init__(self, error: Exception, *, tries: int = 1, wait: float | None = None) -> None:
        super().__init__()
        self.error, self.tries, self.wait = error, tries, wait


def http_client() -> Any:
    """The client that all requests of this process share: `httpx.Client` or `httpx2.Client`."""
    from huggingface_hub import get_session

    for name in _set(_NO_PROXY):
        os.environ[name] = ",".join(map(_excepted, os.environ[name].split(",")))
    try:
        return get_session()
    except OSError:  # of which ssl's errors are
        hint = "correct or unset it; a file of certificates is in PEM"
        found = _at_fault(_CERTIFICATES, _certificates)
        error = UnusableEnvironment.of("certificate", found, hint)
    except Exception as failure:
        # socks without socksio, an unknown scheme, and an address that is none
        known = isinstance(failure, ImportError | ValueError)
        if not known and type(failure).__name__ != "InvalidURL":
            raise
        hint = "correct or unset it; special characters of a password are percent-encoded"
        found = _at_fault(_PROXIES, _proxy) or _set(_NO_PROXY)
        error = UnusableEnvironment.of("proxy", found, hint)
    raise error


def _set(*keys: str) -> list[str]:
    """The variables of these names that are in force; those of proxies win in lower case."""
    pairs = ((key.lower() if key.endswith("_PROXY") else key, key) for key in keys)
    return [name for pair in pairs for name in [n for n in pair if os.environ.get(n)][:1]]


def _at_fault(keys: tuple[str, ...], use: Callable[[str], object]) -> list[str]:
    """Those of the variables whose value `use` cannot take."""
    found = []
    for name in _set(*keys):
        try:
            use(os.environ[name])
        except Exception:
            found.append(name)
    return found


def _certificates(value: str) -> object:
    kind = "capath" if os.path.isdir(value) else "cafile"  # noqa: PTH112  (any text)
    return ssl.create_default_context(**{kind: value})  # type: ignore[arg-type]


def _proxy(value: str) -> object:
    """What the client makes of the address of a proxy."""
    from huggingface_hub.utils import _http

    library: Any = vars(_http).get("httpx2") or vars(_http)["httpx"]
    return library.HTTPTransport(proxy=value if "://" in value else f"http://{value}", verify=False)


def _excepted(entry: str) -> str:
    """An entry of `NO_PROXY` as the client reads it: it knows IPv6 addresses without brackets only,
    a port only behind a scheme, and no ranges."""
    found = _IPV6.fullmatch(entry.strip())
    if found is None:
        return entry
    address, port, wide = found["inner"] or found["bare"], found["port"], found["range"]
    return "" if wide else f"all://[{address}]:{port}" if port else address


def reached(title: str, client: Any, tries: int, call: Callable[[], T]) -> T:
    """Return what `call`, a step of a request, returns."""
    library, start = _library(client), time.monotonic()
    try:
        return call()
    except OscarZooError:
        raise
    except (library.HTTPError, library.InvalidURL, OSError, ValueError) as error:
        failure = _failure(title, library, tries, time.monotonic() - start, error)
    except RuntimeError:
        if not client.is_closed:
            raise
        failure = Failed(HubUnreachable.for_hub(title, "the connection was closed"), tries=tries)
    raise failure


def token(title: str, client: Any, ask: Callable[[], str | None]) -> str | None:
    """The token that `ask` finds for the hub `title`, which may need requests of its own."""
    found = reached(title, client, 1, ask)
    if found is not None and _TOKEN.fullmatch(found) is None:
        message = f"the token for {title} has characters that no token has."
        raise LoginRequired(message, hint="log in again: oscar-zoo login")
    return found


def _library(client: Any) -> Any:
    """The module that has the exceptions of `client`, which may be of a class derived elsewhere."""
    modules = (sys.modules.get(cls.__module__.partition(".")[0]) for cls in type(client).__mro__)
    return next(module for module in modules if hasattr(module, "InvalidURL"))


def _failure(title: str, library: Any, tries: int, seconds: float, error: Exception) -> Failed:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return Failed(
            OfflineError(
                f"{title} is not asked: HF_HUB_OFFLINE is set.", hint="unset it to reach hubs"
            )
        )
    if isinstance(error, library.ConnectTimeout):
        return Failed(HubTimeout.for_hub(title, "does not accept connections"))
    if isinstance(error, library.TimeoutException):
        return Failed(HubTimeout.for_hub(title, "fell silent"))
    if isinstance(
        error, library.InvalidURL | library.UnsupportedProtocol | ValueError
    ):  # some addresses upset urllib
        return Failed(HubUnreachable.for_hub(title, "its address is not valid"))
    if isinstance(error, library.ConnectError):
        return Failed(
            HubUnreachable.for_hub(title, _cause(error)), tries=2 if seconds < QUICK_SECONDS else 1
        )
    if isinstance(error, library.ProxyError):
        return Failed(HubUnreachable.for_hub(title, "the proxy refuses"))
    return Failed(HubUnreachable.for_hub(title, "the connection broke off"), tries=tries)


def _cause(error: BaseException) -> str:
    """Why a connection could not be made, in a few words."""
    known: tuple[tuple[type[BaseException], str], ...] = (
        (socket.gaierror, "its name cannot be resolved"),
        (ConnectionRefusedError, "connection refused"),
        (ssl.SSLCertVerificationError, "its certificate is not trusted"),
        (ssl.SSLError, "no secure connection"),
    )
    for link in _chain(error):
        for kind, words in known:
            if isinstance(link, kind):
                return words
    return "no connection"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
