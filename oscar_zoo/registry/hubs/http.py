"""Reading from a hub: one streamed GET with an end, a bound, and a token that goes to its own hub
only.

It goes over the HTTP client that huggingface_hub set up (proxies, certificates): httpx in its
version 1, httpx2 in version 2, one interface with two sets of exceptions, which are looked up from
the client that is there. Whatever happens becomes an error in our own words: no address, no header,
no token.
"""

from __future__ import annotations

import contextlib
import email.utils
import ipaddress
import os
import random
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar
from urllib.parse import urljoin, urlsplit

from oscar_zoo import errors
from oscar_zoo.registry.hubs.base import Limits, within
from oscar_zoo.version import __version__

T = TypeVar("T")

WRITE_RATE = 10_000
"""Bytes per second that a hub must take when it is written to."""
LEAST_SECONDS = 60.0
"""What a request may take in all, on top of its bytes at the least rate."""
ANSWER_SECONDS = 10.0
"""What the small question may take to which commit a hub is at."""
LONGEST_WAIT = 60.0
"""The longest pause before another try that a hub may ask for, in seconds."""
MAX_REFUSAL_BYTES = 64 << 10
"""How much of the body of an error is read."""
MAX_REDIRECTS = 5
_BUSY = (408, 429)
_PORTS = {"http": 80, "https": 443}
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
_IPV6 = re.compile(
    r"(\[(?P<inner>[0-9a-fA-F:.]+)\](:(?P<port>\d+))?|(?P<bare>[0-9a-fA-F.]*:[0-9a-fA-F:.]+))"
    r"(?P<range>/\d+)?"
)
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class HttpReply:
    """What a hub answered; keys of `headers` are lower case."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


Refusal = Callable[[HttpReply, bool], Exception]
"""The error for a status from 400 to 499 but busy ones; told whether a token had been sent."""


class Failed(Exception):
    """One try of a request that failed: what to raise if it was the last one, whether another may
    help, and how long the hub asks to wait."""

    def __init__(self, error: Exception, *, again: bool = False, wait: float | None = None) -> None:
        super().__init__()
        self.error, self.again, self.wait = error, again, wait


class Transport:
    """GET requests to one hub. The token goes to scheme, host and port of `endpoint` only, and in a
    `cookie` of that name too."""

    def __init__(
        self,
        title: str,
        endpoint: str,
        *,
        token: Callable[[], str | None],
        refusal: Refusal,
        cookie: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.title, self.endpoint = title, endpoint.rstrip("/")
        self.limits = limits or Limits()
        self._token, self._refusal, self._cookie = token, refusal, cookie

    def get(
        self,
        url: str,
        *,
        limit: int,
        size: int | None = None,
        seconds: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> HttpReply:
        """The whole answer to a GET; its status is 200. A body of more than `limit` bytes is
        refused; `seconds` are for everything but the pauses between tries, with each of which
        `progress` starts again."""
        if seconds is None:
            seconds = LEAST_SECONDS + (limit if size is None else size) / self.limits.min_rate
        late = errors.HubTimeout.for_hub(self.title, f"was not done within {seconds:.0f} s")
        client = http_client()  # making it takes time that is not the hub's
        end = time.monotonic() + seconds

        def told(done: int) -> None:
            if time.monotonic() >= end:
                raise Failed(late)  # nobody waits any more
            if progress is not None:
                progress(done)

        for tried in count(1):
            # In a thread, since names are resolved and headers may drip without an end.
            step = partial(self._try, client, url, limit, size, told)
            try:
                left = end - time.monotonic()
                return self._good(*within(left, step, error=lambda: Failed(late)))
            except Failed as failed:
                failure = failed
            pause = 2.0 ** (tried - 1) * random.uniform(0.5, 1.0)
            if failure.wait is not None:
                pause = failure.wait
            done = tried >= self.limits.tries or pause > LONGEST_WAIT
            if done or not failure.again or time.monotonic() >= end:
                raise failure.error
            time.sleep(pause)
            client = http_client()  # another one, if somebody closed it
            end += pause
        raise AssertionError

    def _good(self, reply: HttpReply, sent_token: bool) -> HttpReply:
        status, wait = reply.status, asked_to_wait(reply.headers)
        if status == 200:
            return reply
        if status == 429:
            raise Failed(errors.RateLimited.for_hub(self.title, wait), again=True, wait=wait)
        if 400 <= status < 500 and status not in _BUSY:
            raise self._refusal(reply, sent_token)
        raise self._failed(f"it answers with status {status}", again=status >= 400, wait=wait)

    def _try(
        self, client: Any, url: str, limit: int, size: int | None, told: Callable[[int], None]
    ) -> tuple[HttpReply, bool]:
        response, sent_token = self._open(client, url)
        with contextlib.closing(response):
            stream = response.iter_raw()
            read = partial(reached, self.title, client, lambda: next(stream, b""))
            chunks = iter(read, b"")
            if response.status_code == 200:
                body = self._body(response, chunks, limit, size, told)
            else:
                body = b""
                while len(body) < MAX_REFUSAL_BYTES and (chunk := next(chunks, b"")):
                    body += chunk
        headers = {name.lower(): value for name, value in response.headers.items()}
        return HttpReply(response.status_code, headers, body), sent_token

    def _open(self, client: Any, url: str) -> tuple[Any, bool]:
        source: Origin | None = None
        trusted = True
        for _ in range(MAX_REDIRECTS + 1):
            response, source, sent_token = self._send(client, url, source, trusted)
            if not response.has_redirect_location:
                return response, sent_token
            response.close()
            # Once elsewhere, a way back is no reason to trust again.
            trusted = trusted and sent_token
            try:
                url = urljoin(str(response.url), response.headers["location"])
            except ValueError:
                break
        raise self._failed(f"it redirects more than {MAX_REDIRECTS} times, or to no address")

    def _send(
        self, client: Any, url: str, source: Origin | None, trusted: bool
    ) -> tuple[Any, Origin, bool]:
        """Send one request; the answer without its body, where it came from, and whether a token
        went along."""
        connect, read = self.limits.connect, self.limits.read
        times = {"connect": connect, "read": read, "write": read, "pool": connect}
        build = partial(client.build_request, "GET", extensions={"timeout": times})
        request = reached(self.title, client, partial(build, url))
        home = Origin.of(reached(self.title, client, partial(build, self.endpoint)).url)
        target = Origin.of(request.url)
        if not (source or target).may_redirect_to(target):
            unsafe = "it redirects to an unsafe address" if source else "its address is not valid"
            raise self._failed(unsafe)
        may_see = trusted and target.may_see_token_of(home)
        token = checked_token(self.title, client, self._token) if may_see else None
        # The client remembers cookies, and sends them to every port of a host.
        for name in ("authorization", "cookie"):
            request.headers.pop(name, None)
        request.headers["accept-encoding"] = "identity"
        request.headers["user-agent"] = f"oscar-zoo/{__version__}"
        if token is not None:
            request.headers["authorization"] = f"Bearer {token}"
            if self._cookie is not None:
                request.headers["cookie"] = f"{self._cookie}={token}"
        send = partial(client.send, request, stream=True, auth=None, follow_redirects=False)
        return reached(self.title, client, send), target, token is not None

    def _body(
        self,
        response: Any,
        chunks: Iterator[bytes],
        limit: int,
        size: int | None,
        told: Callable[[int], None],
    ) -> bytes:
        length = response.headers.get("content-length", "")
        declared = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        if declared is not None and declared > limit:
            raise self._too_long(declared, limit)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._failed("it compresses what was to be sent as it is")
        body = bytearray()
        for chunk in chunks:
            body += chunk
            if len(body) > limit:
                raise self._too_long(len(body), limit)
            told(len(body))
        if len(body) < (declared if declared is not None else size or 0):
            raise self._failed("the connection broke off", again=True)
        return bytes(body)

    def _failed(self, cause: str, *, again: bool = False, wait: float | None = None) -> Failed:
        return Failed(errors.HubUnreachable.for_hub(self.title, cause), again=again, wait=wait)

    def _too_long(self, got: int, limit: int) -> errors.MalformedFile:
        text = f"{self.title} sends {got:,} bytes where at most {limit:,} were expected."
        return errors.MalformedFile("file.size", text)


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a hub asks to wait, or `None`: `Retry-After` (RFC 9110: seconds or a date) or
    `RateLimit` (`t=`)."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    if text:
        try:
            moment = email.utils.parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    match = re.search(r";\s*t=([0-9]{1,9})\b", headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def checked_token(title: str, client: Any, ask: Callable[[], str | None]) -> str | None:
    found = reached(title, client, ask)
    if found is not None and _TOKEN.fullmatch(found) is None:
        message = f"the token for {title} has characters that no token has."
        raise errors.LoginRequired(message, hint="log in again: oscar-zoo login")
    return found


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port of an address: who may see a token, and which redirects are followed.

    It is read from the address as the HTTP client itself parsed it, so that what is decided here
    and where the bytes go cannot differ. Two names of one machine are two origins."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def of(cls, url: Any) -> Self:
        scheme = str(url.scheme).lower()
        return cls(scheme, str(url.host).lower(), url.port or _PORTS.get(scheme))

    @property
    def is_private(self) -> bool:
        """Whether nobody between here and there can read along: TLS, or this machine."""
        return self.scheme == "https" or (self.scheme == "http" and _is_loopback(self.host))

    def may_see_token_of(self, hub: Origin) -> bool:
        return self == hub and self.is_private

    def may_redirect_to(self, target: Origin) -> bool:
        """Whether an answer from here may send us to `target`: over HTTP, and never out of TLS."""
        exists = target.scheme in _PORTS and bool(target.host) and target.port in range(1, 1 << 16)
        return exists and (self.scheme, target.scheme) != ("https", "http")


def is_nearby(address: str) -> bool:
    try:
        host = urlsplit(address if "//" in address else f"//{address}").hostname
    except ValueError:
        return False
    return _is_loopback((host or "").lower())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def http_client() -> Any:
    """The client that all requests of this process share: `httpx.Client` or `httpx2.Client`."""
    from huggingface_hub import get_session

    for name in _in_force(["NO_PROXY"]):
        os.environ[name] = ",".join(map(_excepted, os.environ[name].split(",")))
    try:
        return get_session()
    except OSError:  # of which ssl's errors are
        hint = "correct or unset it; a file of certificates is in PEM"
        error = errors.UnusableEnvironment.of("certificate", _in_force(_CERTIFICATES), hint)
    except Exception as failure:
        # socks without socksio, an unknown scheme, and an address that is none
        known = isinstance(failure, ImportError | ValueError)
        if not known and type(failure).__name__ != "InvalidURL":
            raise
        hint = "correct or unset it; special characters of a password are percent-encoded"
        error = errors.UnusableEnvironment.of("proxy", _in_force(_PROXIES), hint)
    raise error


def _in_force(variables: Iterable[str]) -> list[str]:
    pairs = ((key.lower() if key.endswith("_PROXY") else key, key) for key in variables)
    return [name for pair in pairs for name in [n for n in pair if os.environ.get(n)][:1]]


def _excepted(entry: str) -> str:
    """An entry of `NO_PROXY` as the client reads it: it knows IPv6 addresses without brackets only,
    a port only behind a scheme, and no ranges."""
    found = _IPV6.fullmatch(entry.strip())
    if found is None:
        return entry
    address, port, wide = found["inner"] or found["bare"], found["port"], found["range"]
    return "" if wide else f"all://[{address}]:{port}" if port else address


def reached(title: str, client: Any, call: Callable[[], T]) -> T:
    """What `call` returns, a step of a request to the hub `title`; raises `Failed`."""
    # The module with the exceptions of the client, which may be of a class derived elsewhere.
    modules = (sys.modules.get(cls.__module__.partition(".")[0]) for cls in type(client).__mro__)
    library: Any = next(module for module in modules if hasattr(module, "InvalidURL"))
    try:
        return call()
    except errors.OscarZooError:
        raise
    except (library.HTTPError, library.InvalidURL, OSError, ValueError) as error:
        failure = _failure(title, library, error)
    except RuntimeError:
        if not client.is_closed:
            raise
        failure = Failed(
            errors.HubUnreachable.for_hub(title, "the connection was closed"), again=True
        )
    raise failure


def _failure(title: str, library: Any, error: Exception) -> Failed:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        text = f"{title} is not asked: HF_HUB_OFFLINE is set."
        return Failed(errors.OfflineError(text, hint="unset it to reach hubs"))
    if isinstance(error, library.TimeoutException):
        connecting = isinstance(error, library.ConnectTimeout)
        what = "does not accept connections" if connecting else "fell silent"
        return Failed(errors.HubTimeout.for_hub(title, what))
    cause, again = "the connection broke off", True
    # Some addresses upset urllib.
    if isinstance(error, library.InvalidURL | library.UnsupportedProtocol | ValueError):
        cause, again = "its address is not valid", False
    elif isinstance(error, library.ConnectError):
        known = _cause(error)
        cause, again = known or "no connection", known is None
    elif isinstance(error, library.ProxyError):
        cause, again = "the proxy refuses", False
    return Failed(errors.HubUnreachable.for_hub(title, cause), again=again)


def _cause(error: BaseException | None) -> str | None:
    """Why a connection could not be made, in a few words, or `None` where it was only cut off."""
    known: tuple[tuple[type[BaseException], str], ...] = (
        (socket.gaierror, "its name cannot be resolved"),
        (ConnectionRefusedError, "connection refused"),
        (ssl.SSLCertVerificationError, "its certificate is not trusted"),
        (ssl.SSLError, "no secure connection"),
    )
    while error is not None:
        for kind, words in known:
            if isinstance(error, kind):
                return words
        error = error.__cause__ or error.__context__
    return None
