"""Ports that are free, and the addresses by which a server is reached."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable, Collection

from oscar_zoo.engines.sglang.launch.plan import LOOPBACK
from oscar_zoo.errors import PortInUse, UsageError

WILDCARDS = {"0.0.0.0": LOOPBACK, "[::]": "[::1]"}
"""Addresses that mean every address of a machine, and one that a client on it can ask."""

NEVER_GIVEN = range(20_000, 29_000)
"""Ports below those that Linux, macOS and Windows give to connections, and below SGLang's usual."""


def check_port_free(host: str, port: int, *, again: Callable[[], str] | None = None) -> None:
    """Refuse early when something listens on `host:port`."""
    refusal = _bind_error(host, port)
    if refusal is None:
        return
    if refusal.errno == errno.EADDRINUSE:
        other = again() if again else f"--port {next_free_port(host, port) or 'PORT'}"
        raise PortInUse(
            f"port {port} on {host} is taken by another process.", hint=f"choose another: {other}"
        )
    if refusal.errno in (errno.EACCES, errno.EPERM):
        raise UsageError(
            f"you may not listen on port {port}.",
            hint="choose one above 1023, for example --port 30000",
        )
    raise UsageError(
        f"{host} is not an address of this machine.",
        hint="see them: ip address; all: --expose 0.0.0.0",
    )


def next_free_port(host: str, port: int, *, avoid: Collection[int] = ()) -> int | None:
    """The first port above `port` that nobody listens on, `avoid` left out; `None` where a hundred
    are taken."""
    near = (other for other in range(port + 1, min(port + 100, 65536)) if other not in avoid)
    return next((other for other in near if _bind_error(host, other) is None), None)


def free_port() -> int:
    """A port of loopback that nobody listens on now.

    It is one that the system does not give to connections, so that none takes it before a server
    listens there.
    """
    for port in random.sample(NEVER_GIVEN, 100):
        if _bind_error(LOOPBACK, port) is None:
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def client_url(url: str) -> str:
    """Where a client on this machine reaches a server that listens at `url`."""
    for wildcard, address in WILDCARDS.items():
        url = url.replace(f"://{wildcard}:", f"://{address}:")
    return url


def _bind_error(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:  # gaierror of an unknown name included
            return error
    return None
