from __future__ import annotations

from typing import NamedTuple

import pytest

from oscar_zoo.registry.hubs.http import Origin


class Url(NamedTuple):
    scheme: str
    host: str
    port: int | None


ORIGINS = {
    "hub": Url("https", "hub.example", None),
    "hub, port spelled": Url("https", "HUB.example", 443),
    "hub, other port": Url("https", "hub.example", 8443),
    "hub in clear": Url("http", "hub.example", None),
    "other host": Url("https", "cdn.hub.example", None),
    "hub, final dot": Url("https", "hub.example.", None),
    "loopback": Url("http", "127.0.0.1", 8000),
    "loopback, other port": Url("http", "127.0.0.1", 8001),
    "loopback by name": Url("http", "localhost", 8000),
    "loopback, IPv6": Url("http", "::1", 8000),
    "loopback with TLS": Url("https", "127.0.0.1", 8000),
    "private network": Url("http", "10.0.0.7", 8000),
}
SEES = {
    ("hub", "hub"),
    ("hub", "hub, port spelled"),
    ("hub, port spelled", "hub"),
    ("hub, port spelled", "hub, port spelled"),
    *((name, name) for name in ORIGINS if name not in ("hub in clear", "private network")),
}


@pytest.mark.parametrize("hub", ORIGINS)
def test_a_token_goes_to_its_own_origin_in_private_and_nowhere_else(hub: str) -> None:
    home = Origin.of(ORIGINS[hub])
    seen = {target for target, url in ORIGINS.items() if Origin.of(url).may_see_token_of(home)}
    assert seen == {target for target in ORIGINS if (hub, target) in SEES}


@pytest.mark.parametrize("source", ORIGINS)
def test_redirects_never_leave_tls(source: str) -> None:
    here = Origin.of(ORIGINS[source])
    allowed = {target for target, url in ORIGINS.items() if here.may_redirect_to(Origin.of(url))}
    assert allowed == {
        target for target, url in ORIGINS.items() if (here.scheme, url.scheme) != ("https", "http")
    }


@pytest.mark.parametrize("scheme", ["ftp", "file", "data", "", "HTTPS+unix", "javascript"])
def test_redirects_lead_to_http_only(scheme: str) -> None:
    assert not Origin.of(ORIGINS["loopback"]).may_redirect_to(
        Origin.of(Url(scheme, "hub.example", None))
    )
    assert not Origin.of(ORIGINS["hub"]).may_redirect_to(Origin.of(Url("https", "", None)))
    assert not Origin.of(ORIGINS["hub"]).may_redirect_to(
        Origin.of(Url("https", "hub.example", 443 + (1 << 16)))
    )


@pytest.mark.parametrize(
    "host", ["127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "2130706433", "127.1"]
)
def test_names_that_look_like_loopback_are_not(host: str) -> None:
    origin = Origin.of(Url("http", host, 80))
    assert not origin.may_see_token_of(origin)
