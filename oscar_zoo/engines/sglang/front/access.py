"""Who may ask a server, by which names, from which pages, and for which routes.

A page of another origin can send requests to a server on loopback, and with a name that is bound
to 127.0.0.1 later (DNS rebinding) even read the answers. The browser says which page asks in
`Origin` and `Sec-Fetch-Site`, and which name it used in `Host`. Routes are one explicit list for
each tested release: what is in no list does not exist for clients.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets as random
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from oscar_zoo.errors import UsageError

OFF, ON = "off", "on"
"""Values of `--oscar-front` besides the path of a file."""
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
WILDCARDS = frozenset({"0.0.0.0", "::"})
FOREIGN = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` of pages with another origin."""
GET, POST = frozenset({"GET", "HEAD"}), frozenset({"POST"})
PUT = frozenset({"POST", "PUT"})
Table = Mapping[str, frozenset[str]]
"""Methods by path; `{name}` is one part of a path, and `{name:path}` the rest of it."""


def _table(methods: frozenset[str], paths: str) -> Table:
    return dict.fromkeys(paths.split(), methods)


_BOTH: Table = {
    **_table(GET, "/ /health /health_generate /ping /metrics /metrics/ /v1/loads /api/tags"),
    **_table(GET, "/model_info /get_model_info /server_info /get_server_info"),
    **_table(GET, "/v1/models /v1/models/{model:path} /v1/responses/{response_id}"),
    **_table(PUT, "/generate"),
    **_table(POST, "/tokenize /detokenize /v1/tokenize /v1/detokenize /api/show"),
    **_table(POST, "/v1/completions /v1/chat/completions"),
    **_table(POST, "/v1/responses /v1/responses/{response_id}/cancel"),
    **_table(POST, "/v1/messages /v1/messages/count_tokens"),
}
OPEN: Mapping[str, Table] = {
    "0.5.17": {**_BOTH, **_table(GET, "/weight_version /get_weight_version /get_load")},
    "0.5.21": {**_BOTH, **_table(GET, "/ready")},
    "0.5.23": {**_BOTH, **_table(GET, "/ready")},
}
"""Routes for everybody who may ask at all, by release."""
VLLM: Table = {
    **_table(GET, "/health /ping /metrics /metrics/ /version /v1/models"),
    **_table(GET, "/v1/responses/{response_id}"),
    **_table(POST, "/tokenize /detokenize /v1/completions /v1/chat/completions"),
    **_table(POST, "/v1/responses /v1/responses/{response_id}/cancel"),
    **_table(POST, "/v1/messages /v1/messages/count_tokens"),
}
"""The same of vLLM."""
# Not Ollama's /api/chat: with transformers 5 these releases fail there, whatever they are asked.
ENGINE_API: Table = {
    **_table(PUT, "/encode /classify /v1/rerank"),
    **_table(POST, "/invocations /vertex_generate /v1/embeddings /v1/classify /v1/score"),
    **_table(POST, "/v1/decisions /v1/systemone /api/generate"),
}
"""Routes that `--engine-api` opens besides, with all fields of the engine; some releases lack some.
"""
ADMINISTRATION: Table = {"/flush_cache": frozenset({"POST"}), "/freeze_gc": frozenset({"POST"})}
"""Routes for the administration key, which only tools of this user on this machine have: `eval` and
`bench` empty the prefix cache, and SGLang itself freezes its garbage collector after a start."""


@dataclass(frozen=True)
class FrontSettings:
    host: str  # the address that the server listens on
    origins: tuple[str, ...] = ()  # origins of pages that may ask and read
    # What clients must know, or `None` where everybody may ask.
    key: str | None = field(default=None, repr=False)
    # What SGLang wants in place of `key`, so that it never learns that one.
    engine_key: str | None = field(default=None, repr=False)
    # What tools of this user know; it opens `routes.ADMINISTRATION`.
    administration_key: str | None = field(default=None, repr=False)
    engine_api: bool = False  # leave out the lists of `fields`, and open `routes.ENGINE_API`
    id: str = ""  # a word by which the starter of a server sees that these settings are in force

    @classmethod
    def make(
        cls, host: str, origins: tuple[str, ...], key: str | None, *, engine_api: bool = False
    ) -> FrontSettings:
        """With new keys for SGLang and for administration. SGLang makes arguments of them, and
        would take one that begins with a hyphen for a flag."""
        return cls(
            host=host,
            origins=origins,
            key=key,
            engine_key=None if key is None else random.token_hex(32),
            administration_key=random.token_hex(32),
            engine_api=engine_api,
            id=random.token_hex(16),
        )

    @property
    def secrets(self) -> tuple[str, ...]:
        found = (self.key, self.engine_key, self.administration_key)
        return tuple({one for one in found if one})

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, path: Path) -> FrontSettings:
        """Read the file `path`; raises `OSError`, or `ValueError` when it holds something else."""
        value = json.loads(path.read_bytes())
        return cls(**(value | {"origins": tuple(value["origins"])}))


def is_named(header: str, host: str, *, has_key: bool) -> bool:
    """Whether a `Host` header names a server that listens on `host`; the port may be another one
    (containers). A server on every address of a machine, whose requests need a key, may be called
    by any name, such as that of a container: a page knows no key."""
    everywhere = host in WILDCARDS
    if everywhere and has_key:
        return True
    name = host_name(header)
    if name is None:
        return False
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in LOOPBACK_NAMES or name == host.lower()
    return address.is_loopback or everywhere or name == host.lower()


def host_name(header: str) -> str | None:
    """The name of a `Host` header in lower case, without port and brackets; `None` for nonsense."""
    try:
        parts = urlsplit(f"//{header}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    plain = parts.netloc == header and "@" not in header
    return name.lower() if name and plain else None


def is_loopback(peer: str | None) -> bool:
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def parse_origin(text: str) -> str:
    try:
        parts = urlsplit(text.rstrip("/"))
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not host or parts.path or parts.query:
        raise UsageError(
            f"{text!r} is not the origin of a page.", hint="for example http://localhost:3000"
        )
    usual = {"http": 80, "https": 443}[parts.scheme]
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + ("" if port in (None, usual) else f":{port}")


def may_ask(origin: str | None, site: bytes | None, host: str, allowed: Collection[str]) -> bool:
    """Whether a page may send a request to a server that it calls `host`; no page at all may. One
    of the server itself came by HTTP: a page of https with its name is of a proxy, which
    `--allow-origin` can open."""
    if origin is None:
        return site not in FOREIGN
    return origin in allowed or origin.lower() == f"http://{host.lower()}"


@dataclass(frozen=True)
class Routes:
    exact: Table
    templates: tuple[tuple[re.Pattern[str], frozenset[str]], ...]  # paths with parts that vary

    @classmethod
    def of(cls, table: Table) -> Routes:
        exact = {path: methods for path, methods in table.items() if "{" not in path}
        templates = [(_pattern(path), table[path]) for path in table.keys() - exact.keys()]
        return cls(exact, tuple(templates))

    def has(self, path: str, method: str) -> bool:
        if path in self.exact:
            return method in self.exact[path]
        return any(method in methods for found, methods in self.templates if found.fullmatch(path))


def open_routes(version: str, *, engine_api: bool = False) -> Routes:
    """The routes that clients of SGLang `version` reach: those of the last tested release that is
    not after it, else of the first one."""
    ordered = sorted(OPEN, key=_number)
    before = [one for one in ordered if _number(one) <= _number(version)]
    table = OPEN[before[-1] if before else ordered[0]]
    return Routes.of({**table, **(ENGINE_API if engine_api else {})})


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+(:path)?\}", path)
    texts, kinds = parts[::2], parts[1::2]
    found = re.escape(texts[0])
    for kind, text in zip(kinds, texts[1:], strict=True):
        found += (".+" if kind else "[^/]+") + re.escape(text)
    return re.compile(found)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
