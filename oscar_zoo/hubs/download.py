"""One try of a GET: redirects by hand, the token for one origin, bytes counted and timed as they
arrive.

Both steps, up to the header of the answer and through its body, run under the patience of the whole
request. A try that was given up closes its connection at the next byte and tells nobody about it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urljoin

from oscar_zoo.errors import HubTimeout, HubUnreachable, MalformedFile
from oscar_zoo.hubs import session
from oscar_zoo.hubs.deadline import Patience, within
from oscar_zoo.hubs.origin import Origin
from oscar_zoo.hubs.session import Failed
from oscar_zoo.version import __version__

T = TypeVar("T")
Progress = Callable[[int], None]

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Limits:
    """How long a hub may take.

    Attributes:
        connect: seconds to connect.
        answer: seconds until the header of an answer is complete, connecting included.
        read: seconds without a byte.
        min_rate: bytes per second, measured over `rate_window` seconds.
        rate_window: see `min_rate`.
        tries: how often a request is sent that breaks off or meets a busy server; one that ran out
            of time is not sent again, unless this process was stopped meanwhile.
        patience: seconds to wait between tries, all together.
    """

    connect: float = 5.0
    answer: float = 7.0
    read: float = 10.0
    min_rate: int = 10_000
    rate_window: float = 20.0
    tries: int = 4
    patience: float = 60.0


@dataclass(frozen=True)
class Site:
    """Whom requests go to; see `Transport` for the fields."""

    title: str
    endpoint: str
    token: Callable[[], str | None]
    cookie: str | None
    limits: Limits


class Download:
    """One try, as a context: leaving it gives up what still runs.

    Args:
        site: whose limits, token and name apply.
        client: of `session.http_client`; making it takes time that is not the hub's.
        patience: of the whole request.
    """

    def __init__(self, site: Site, client: Any, *, patience: Patience, late: HubTimeout) -> None:
        self._site = site
        self._client = client
        self._patience = patience
        self._late = late
        self._given_up = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._given_up.set()

    def open(self, url: str) -> tuple[Any, bool]:
        """The first answer that is no redirect, its body still to be read, and whether a token went
        along.
        """
        silent = HubTimeout.for_hub(
            self._site.title, f"did not answer within {self._site.limits.answer:g} s"
        )
        source: Origin | None = None
        trusted = True
        for _ in range(MAX_REDIRECTS + 1):
            send = partial(self._send, url, source, trusted)
            response, source, sent_token = self._in_time(send, self._site.limits.answer, silent)
            location = response.headers.get("location")
            if response.status_code not in _REDIRECTS or not location:
                return response, sent_token
            response.close()
            trusted = (
                trusted and sent_token
            )  # once elsewhere, a way back is no reason to trust again
            try:
                url = urljoin(str(response.url), location)
            except ValueError:
                break
        raise Failed(
            self._unreachable(f"it redirects more than {MAX_REDIRECTS} times, or to no address")
        )

    def whole(
        self, response: Any, limit: int, size: int | None, progress: Progress | None
    ) -> bytes:
        """The body of a good answer."""
        return self._in_time(partial(self._whole, response, limit, size, progress))

    def start(self, response: Any, limit: int) -> bytes:
        """The first `limit` bytes of the body, or a few more."""
        return self._in_time(partial(self._start, response, limit))

    def _in_time(
        self, step: Callable[[], T], most: float | None = None, late: HubTimeout | None = None
    ) -> T:
        left = self._patience.left
        if most is not None and late is not None and most < left:
            return within(most, step, error=lambda: Failed(late), patience=self._patience)
        return within(left, step, error=lambda: Failed(self._late), patience=self._patience)

    def _send(self, url: str, source: Origin | None, trusted: bool) -> tuple[Any, Origin, bool]:
        """Send one request and return the answer without its body, where it came from, and whether
        a token went."""
        site, limits = self._site, self._site.limits
        client = self._client
        times = {
            "connect": limits.connect,
            "read": limits.read,
            "write": limits.read,
            "pool": limits.connect,
        }
        build = partial(client.build_request, "GET", extensions={"timeout": times})
        request = self._reached(partial(build, url))
        target, home = (
            Origin.of(request.url),
            Origin.of(self._reached(partial(build, site.endpoint)).url),
        )
        if not (source or target).may_redirect_to(target):
            cause = "it redirects to an unsafe address" if source else "its address is not valid"
            raise Failed(self._unreachable(cause))
        token = (
            session.token(site.title, client, site.token)
            if trusted and target.may_see_token_of(home)
            else None
        )
        for name in (
            "authorization",
            "cookie",
        ):  # the client remembers cookies, and sends them to every port of a host
            request.headers.pop(name, None)
        request.headers.update(
            {"accept-encoding": "identity", "user-agent": f"oscar-zoo/{__version__}"}
        )
        if token is not None:
            request.headers["authorization"] = f"Bearer {token}"
            if site.cookie is not None:
                request.headers["cookie"] = f"{site.cookie}={token}"
        response = self._reached(
            partial(client.send, request, stream=True, auth=None, follow_redirects=False)
        )
        if self._given_up.is_set():
            response.close()
        return response, target, token is not None

    def _whole(
        self, response: Any, limit: int, size: int | None, progress: Progress | None
    ) -> bytes:
        with contextlib.closing(response):
            declared = _length(response.headers.get("content-length", ""))
            if declared is not None and declared > limit:
                raise self._too_long(declared, limit)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Failed(self._unreachable("it compresses what was to be sent as it is"))
            body = bytearray()
            for chunk in self._chunks(response):
                body += chunk
                if len(body) > limit:
                    raise self._too_long(len(body), limit)
                if progress is not None:
                    progress(len(body))
            if len(body) < (declared if declared is not None else size or 0):
                raise Failed(
                    self._unreachable("the connection broke off"), tries=self._site.limits.tries
                )
            return bytes(body)

    def _start(self, response: Any, limit: int) -> bytes:
        body = bytearray()
        with contextlib.closing(response):
            for chunk in self._chunks(response):
                body += chunk
                if len(body) >= limit:
                    break
        return bytes(body)

    def _chunks(self, response: Any) -> Iterator[bytes]:
        """What arrives, as it arrives, unless it is too slow or nobody waits for it any more."""
        limits, stream, patience = self._site.limits, response.iter_raw(), self._patience
        since, recent = patience.spent, 0
        while chunk := self._reached(lambda: next(stream, b"")):
            if self._given_up.is_set():
                raise Failed(self._late)
            recent += len(chunk)
            now = patience.spent
            if now - since >= limits.rate_window:
                if recent < limits.min_rate * (now - since):
                    slow = f"sends less than {limits.min_rate:,} bytes per second"
                    raise Failed(HubTimeout.for_hub(self._site.title, slow))
                since, recent = now, 0
            yield chunk

    def _reached(self, step: Callable[[], T]) -> T:
        """`step`, with an error of ours. A limit of the socket that passed while nothing could run
        is no silence."""
        patience, tries = self._patience, self._site.limits.tries
        start, lost = patience.spent + patience.lost, patience.lost
        try:
            return session.reached(self._site.title, self._client, tries, step)
        except Failed as failed:
            if isinstance(failed.error, HubTimeout):
                took = patience.spent + patience.lost - start
                if patience.lost - lost > took / 2:
                    failed.tries = max(tries, 2)
            raise

    def _unreachable(self, cause: str) -> HubUnreachable:
        return HubUnreachable.for_hub(self._site.title, cause)

    def _too_long(self, got: int, limit: int) -> MalformedFile:
        return MalformedFile(
            "file.size",
            f"{self._site.title} sends {got:,} bytes where at most {limit:,} were expected.",
        )


def _length(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
