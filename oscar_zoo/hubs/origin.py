"""Who may see a token, and which redirects are followed: decisions about schemes, hosts and ports,
nothing else.

An origin is read from the address as the HTTP client itself parsed it, so that what is decided here
and where the bytes go cannot differ.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port of an address. Two names of one machine are two origins."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def of(cls, url: Any) -> Self:
        """The origin of a URL object of the HTTP client, which has `scheme`, `host` and `port`."""
        scheme = str(url.scheme).lower()
        return cls(scheme, str(url.host).lower(), url.port or _PORTS.get(scheme))

    @property
    def is_private(self) -> bool:
        """Whether nobody between here and there can read along: TLS, or this machine."""
        return self.scheme == "https" or (self.scheme == "http" and _is_loopback(self.host))

    def may_see_token_of(self, hub: Origin) -> bool:
        """Whether a token for `hub` may be sent here."""
        return self == hub and self.is_private

    def may_redirect_to(self, target: Origin) -> bool:
        """Whether an answer from here may send us to `target`: over HTTP, and never out of TLS."""
        exists = target.scheme in _PORTS and bool(target.host) and target.port in range(1, 1 << 16)
        return exists and (self.scheme, target.scheme) != ("https", "http")


def is_nearby(address: str) -> bool:
    """Whether `address`, with or without a scheme, is on this machine."""
    try:
        return _is_loopback(
            (urlsplit(address if "//" in address else f"//{address}").hostname or "").lower()
        )
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
