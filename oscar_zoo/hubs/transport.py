"""Reading from a hub: a GET with an end, a bound, and a token that goes to its own hub only.

The clients of the hubs have no total deadline, no minimum rate, no bound on sizes and no check of
content, so bodies and listings are streamed here, over the HTTP session that huggingface_hub set up
(proxies, certificates). Whatever happens becomes an error of this library in our own words: no
address, no header, no token.
"""

from __future__ import annotations

import email.utils
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from oscar_zoo.errors import HubTimeout, HubUnreachable, RateLimited
from oscar_zoo.hubs import session
from oscar_zoo.hubs.deadline import Patience
from oscar_zoo.hubs.download import Download, Limits, Site
from oscar_zoo.hubs.session import Failed

__all__ = ["HttpReply", "Limits", "Refusal", "Transport", "asked_to_wait"]

LEAST_BODY_SECONDS = 60.0
MAX_REFUSAL_BYTES = 64 << 10
"""How much of the body of an error is read."""


@dataclass(frozen=True)
class HttpReply:
    """What a hub answered. Keys of `headers` are lower case; `url` may be signed and is not
    shown."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    url: str = field(repr=False)


Refusal = Callable[[HttpReply, bool], Exception]
"""The error for a reply with a status from 400 to 499, 429 excepted; told whether a token had been
sent."""


class Transport:
    """GET requests to one hub.

    Args:
        endpoint: address of the hub; the token goes to its scheme, host and port only.
        token: the token of the user, or `None`; asked before every request that may carry it, in
            another thread.
        cookie: name of a cookie that carries the token too.
        limits: how long things may take.
    """

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
        self.title = title
        self.endpoint = endpoint.rstrip("/")
        self.limits = limits or Limits()
        self._site = Site(title, self.endpoint, token, cookie, self.limits)
        self._refusal = refusal

    def get(
        self,
        url: str,
        *,
        limit: int,
        size: int | None = None,
        budget: float | Patience | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> HttpReply:
        """The whole answer to a GET; its status is 200.

        Args:
            limit: a body with more bytes than this is refused.
            size: bytes of the body, where they are known.
            budget: seconds for everything but the pauses between tries, or a patience that several
                requests share; default what the body takes at the minimum rate, at least a minute.
            progress: told the bytes that arrived so far, in another thread; they start again with
                every try.
        """
        seconds = max(LEAST_BODY_SECONDS, (limit if size is None else size) / self.limits.min_rate)
        client = session.http_client()
        if not isinstance(budget, Patience):
            budget = Patience(seconds if budget is None else budget)
        patience = budget
        late = HubTimeout.for_hub(self.title, f"was not done within {patience.seconds:.0f} s")
        waited, tried = 0.0, 0
        while True:
            download = Download(self._site, client, patience=patience, late=late)
            try:
                return self._try(download, url, limit, size, progress)
            except Failed as failed:
                failure = failed
            tried += 1
            pause = (
                failure.wait
                if failure.wait is not None
                else 2.0 ** (tried - 2) * random.uniform(0.5, 1.0)
            )
            waited += pause
            own = (
                0.0 if failure.wait is not None else pause
            )  # what the hub asks for is not its slowness
            if tried >= failure.tries or waited > self.limits.patience or own >= patience.left:
                raise failure.error
            time.sleep(pause)
            client = session.http_client()  # another one, if somebody closed it

    def _try(
        self,
        download: Download,
        url: str,
        limit: int,
        size: int | None,
        progress: Callable[[int], None] | None,
    ) -> HttpReply:
        with download:
            response, sent_token = download.open(url)
            if response.status_code == 200:
                body = download.whole(response, limit, size, progress)
            else:
                body = download.start(response, MAX_REFUSAL_BYTES)
        headers = {name.lower(): value for name, value in response.headers.items()}
        reply = HttpReply(response.status_code, headers, body, str(response.url))
        if reply.status == 200:
            return reply
        if reply.status == 429:
            wait = asked_to_wait(headers)
            raise Failed(RateLimited.for_hub(self.title, wait), tries=self.limits.tries, wait=wait)
        if 400 <= reply.status < 500:
            raise self._refusal(reply, sent_token)
        broken = HubUnreachable.for_hub(self.title, f"it answers with status {reply.status}")
        if reply.status >= 500:
            raise Failed(broken, tries=self.limits.tries, wait=asked_to_wait(headers))
        raise broken


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
