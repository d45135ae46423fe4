"""The front itself: it sees every request before any part of SGLang does."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from oscar_zoo.engines.sglang.front import access, fields, messages
from oscar_zoo.engines.sglang.front.access import ADMINISTRATION, FrontSettings, Routes
from oscar_zoo.engines.sglang.front.messages import (
    CLOSE,
    MOST_BODY,
    TOO_LARGE,
    Body,
    Receive,
    Refused,
    Send,
)

Scope = dict[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATH = "/oscar_front"
"""A route of the front, by which the starter of a server sees that it is there. Who has a key is
also told how many requests are being answered, as `requests`, and what `live` says."""
FREEZE = "/freeze_gc"
WITHOUT_KEY = frozenset({"/health", "/ready", "/ping", "/metrics", "/metrics/", PATH})
"""Routes that need no key: those of health checks and of Prometheus."""
WITH_SECRETS = frozenset({"/server_info", "/get_server_info"})
"""Routes whose answers hold the arguments of the server."""
PASSED = frozenset(
    b"host user-agent accept accept-encoding content-type connection anthropic-version".split()
)
"""Headers of a client that SGLang sees. It reads many more: ranks, keys of routers, labels."""
NOT_PASSED = (b"authorization", b"x-api-key", b"origin", b"content-encoding")
ONCE = frozenset(
    b"origin host authorization x-api-key content-length content-type content-encoding"
    b" transfer-encoding sec-fetch-site".split()
)
"""Headers that decide something: of two of them different readers take different ones."""
CLOSED = "does not exist here. Routes that change a server are closed; see docs/security.md"
NEEDS_KEY = "This server needs its API key: Authorization: Bearer KEY."


class Front:
    """An ASGI application around SGLang's. `freezing` is set while SGLang asks itself for
    `/freeze_gc`, without a key where it has none; `off` says why SGLang cannot answer a path of
    `routes`, in sentences, or gives `None` where it can; `also` are fields beside those of
    `fields`."""

    def __init__(
        self,
        app: App,
        settings: FrontSettings,
        routes: Routes,
        facts: Mapping[str, Any],
        freezing: threading.Event | None = None,
        *,
        off: Callable[[str], str | None] = lambda path: None,
        live: Callable[[], Mapping[str, Any]] = dict,
        also: frozenset[str] = frozenset(),
    ) -> None:
        self._freezing, self._off, self._live = freezing or threading.Event(), off, live
        self._app, self._settings, self._routes, self._facts = app, settings, routes, dict(facts)
        self._bodies: dict[Body, int] = {}
        self._also = also
        self._answering: set[object] = set()
        self._administration = Routes.of(ADMINISTRATION)
        keys = (settings.key, settings.engine_key, settings.administration_key)
        self._client_keys = [key.encode() for key in keys if key is not None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # a websocket: SGLang asks it for no key
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers: dict[bytes, bytes] = dict(scope["headers"])
            path, method = _path(scope), scope["method"]
            _check_once(scope["headers"])
            known = self._known(headers)
            self._refuse_foreign(headers, known=known)
            cors = self._cors(headers)
            send = messages.passing(send, headers=cors) if cors else send
            if cors and method == "OPTIONS":
                await messages.answer(send, 204, None, _preflight(headers))
            elif path == PATH and method == "GET":
                number = {"requests": len(self._answering), **self._live()} if known else {}
                await messages.answer(send, 200, self._facts | number)
            elif self._administration.has(path, method) and self._administers(scope, headers):
                await self._app(scope, receive, send)
            elif not self._routes.has(path, method):
                raise Refused(404, f"{method} {path[:100]} {CLOSED}.", "not_found")
            elif self._settings.key is not None and not known and path not in WITHOUT_KEY:
                bearer = [(b"www-authenticate", b"Bearer")]
                raise Refused(401, NEEDS_KEY, "invalid_api_key", headers=bearer)
            else:
                one = object()
                if method == "POST":  # other routes are answered at once
                    self._answering.add(one)
                    send = messages.passing(send, ended=lambda: self._answering.discard(one))
                try:
                    await self._ask(scope, headers, path, receive, send)
                finally:
                    self._answering.discard(one)
        except Refused as refused:
            await messages.refuse(send, refused)

    async def _ask(
        self, scope: Scope, headers: Mapping[bytes, bytes], path: str, receive: Receive, send: Send
    ) -> None:
        """Let SGLang answer: without what only the front needs to know, and bounded."""
        off = self._off(path)
        if off is not None:
            raise Refused(501, off, "not_implemented")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BODY:
            raise Refused(*TOO_LARGE, headers=CLOSE)
        body = Body(receive, self._bodies)
        try:
            reason = await body.read()
            if reason is not None:
                raise Refused(*reason, headers=CLOSE)
            ids = self._read(path, body)
            if path in WITH_SECRETS:
                send = messages.without(send, self._settings.secrets)
            send = messages.refused_stream(send)
            send = messages.with_ids(send, ids) if ids else send
            passed = messages.passing(send, begun=body.release)
            length = str(len(body.content)).encode()
            await self._app({**scope, "headers": self._passed(scope, length)}, body, passed)
        finally:
            body.release()

    def _read(self, path: str, body: Body) -> dict[str, str]:
        """Check what a body asks for, and have SGLang read exactly what was checked."""
        if not body.content:
            return {}
        value = fields.read(body.content)
        if not self._settings.engine_api:
            value = fields.check(path, value, self._also)
        ids = fields.own_ids(value) if isinstance(value, dict) else {}
        body.content = json.dumps(value).encode()
        return ids

    def _passed(self, scope: Scope, length: bytes) -> list[tuple[bytes, bytes]]:
        """The headers for SGLang: its own key in place of the client's, the length of the body that
        it gets, and of the others those of `PASSED`, or with `--engine-api` all but those by which
        its permissive CORS would answer."""
        kept = [
            one
            for one in scope["headers"]
            if one[0] in PASSED
            or (self._settings.engine_api and one[0] not in (*NOT_PASSED, b"content-length"))
        ]
        if any(name == b"content-length" for name, _ in scope["headers"]):
            kept.append((b"content-length", length))
        if self._settings.engine_key is not None:
            kept.append((b"authorization", f"Bearer {self._settings.engine_key}".encode()))
        return kept

    def _refuse_foreign(self, headers: Mapping[bytes, bytes], *, known: bool) -> None:
        """Refuse a request that comes from where nobody may ask."""
        host, has_key = headers.get(b"host", b"").decode("latin-1"), self._settings.key is not None
        named = access.is_named(host, self._settings.host, has_key=has_key)
        if host and not named and not known:
            why = f"The Host {host[:100]!r} is none of this server's names. Ask for its address, or"
            raise Refused(403, f"{why} send its API key.", "forbidden")
        origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
        site = headers.get(b"sec-fetch-site")
        if not access.may_ask(origin, site, host, self._settings.origins):
            page = (origin or "another origin")[:100]
            why = f"Pages of {page} may not ask this server. Open it for them:"
            raise Refused(403, f"{why} oscar-zoo serve --allow-origin URL.", "forbidden")

    def _cors(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        origin = headers.get(b"origin", b"")
        if origin.decode("latin-1") not in self._settings.origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]

    def _known(self, headers: Mapping[bytes, bytes]) -> bool:
        given = _given_key(headers)
        return any(secrets.compare_digest(given, key) for key in self._client_keys)

    def _administers(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        if not access.is_loopback((scope.get("client") or (None,))[0]):
            return False
        if self._freezing.is_set() and _path(scope) == FREEZE:
            return True
        key = self._settings.administration_key
        return key is not None and secrets.compare_digest(_given_key(headers), key.encode())


def _check_once(headers: Iterable[tuple[bytes, bytes]]) -> None:
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in seen:
            raise Refused(400, f"{name.decode('latin-1')} stands there twice.", "invalid_header")
        seen |= {name} & ONCE


def _path(scope: Scope) -> str:
    """The path by which Starlette chooses a route."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key of a request: a bearer token, or `x-api-key` as Anthropic's clients send it."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _preflight(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (
            b"access-control-allow-headers",
            headers.get(b"access-control-request-headers", b"authorization, content-type"),
        ),
        (b"access-control-max-age", b"600"),
    ]
