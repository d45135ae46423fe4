"""Host and Origin of a request: by which names a server may be called, and by which pages.

A page of another origin can send requests to a server on loopback, and with a name that is bound
to 127.0.0.1 later (DNS rebinding) even read the answers. The browser says which page asks in
`Origin` and `Sec-Fetch-Site`, and which name it used in `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from oscar_zoo.errors import UsageError

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
WILDCARDS = frozenset({"0.0.0.0", "::"})
FOREIGN = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` of pages with another origin."""


@dataclass(frozen=True)
class Names:
    """The names of a server.

    Attributes:
        host: the address that it listens on, as `--expose` says.
        has_key: whether requests need a key. A server on every address of a machine may then be
            called by any name, such as that of a container: a page knows no key.
    """

    host: str
    has_key: bool

    def has(self, header: str) -> bool:
        """Whether a `Host` header names this server; the port may be another one (containers)."""
        everywhere = self.host in WILDCARDS
        if everywhere and self.has_key:
            return True
        name = host_name(header)
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in LOOPBACK_NAMES or name == self.host.lower()
        return address.is_loopback or everywhere or name == self.host.lower()


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
    """Whether a client's address is one of this machine."""
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def parse_origin(text: str) -> str:
    """An origin as browsers send it."""
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


def is_own_page(origin: str, host: str) -> bool:
    """Whether a page with `origin` came from the server itself, which was asked as `host`.

    It speaks HTTP: a page of https with its name is of a proxy, which `--allow-origin` can open.
    """
    return origin.lower() == f"http://{host.lower()}"


def may_ask(origin: str | None, site: bytes | None, host: str, allowed: Collection[str]) -> bool:
    """Whether a page may send a request; no page at all may."""
    if origin is None:
        return site not in FOREIGN
    return origin in allowed or is_own_page(origin, host)
