"""The HTTP client that huggingface_hub set up, and its exceptions in our words.

Version 1 of huggingface_hub brings httpx, version 2 httpx2: one interface, two sets of exception
classes. They are looked up from the client that is there, so neither library is named here.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from oscar_zoo.errors import HubTimeout, HubUnreachable, LoginRequired, OfflineError, OscarZooError

T = TypeVar("T")
QUICK_SECONDS = 2.0
"""A connection that fails faster than this is tried once more."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PROXIES = tuple(f"{kind}_PROXY" for kind in ("HTTPS", "HTTP", "ALL", "NO"))
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
    """The client that all requests of this process share: `httpx.Client` or `httpx2.Client`.

    Raises:
        HubUnreachable: variables of the environment keep it from being made. It refers to no other
            exception: those hold parts of the proxy's password.
    """
    from huggingface_hub import get_session

    try:
        return get_session()
    except OSError:  # of which ssl's errors are
        error = HubUnreachable.for_environment("certificate", CERTIFICATES)
    except (ImportError, ValueError):  # socks without socksio, an unknown scheme
        error = HubUnreachable.for_environment("proxy", PROXIES)
    except Exception as failure:
        if type(failure).__name__ != "InvalidURL":
            raise
        error = HubUnreachable.for_environment("proxy", PROXIES)
    raise error


def reached(title: str, client: Any, tries: int, call: Callable[[], T]) -> T:
    """Return what `call`, a step of a request, returns.

    Args:
        title: the hub in a sentence.
        client: what `http_client` returned.
        tries: how often a request that broke off is sent.
        call: the step.

    Raises:
        Failed: the step did not work. It refers to no exception of the client: those hold the
            request and its token.
        OscarZooError: what `call` raises itself.
    """
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
    """The token that `ask` finds for the hub `title`, which may need requests of its own.

    Raises:
        LoginRequired: it cannot be one.
        Failed: it could not be had.
    """
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
