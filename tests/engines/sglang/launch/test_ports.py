"""Ports that are free, on the sockets of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch import ports
from oscar_zoo.errors import PortInUse


def test_a_taken_port_is_refused_with_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            ports.check_port_free("127.0.0.1", port)
        other = ports.next_free_port("127.0.0.1", port)
        later = ports.next_free_port("127.0.0.1", port, avoid={other or 0})
    assert str(port) in caught.value.message and f"--port {other}" in str(caught.value.hint)
    assert other is not None and later is not None and later > other > port
    ports.check_port_free("127.0.0.1", other)


def test_no_connection_takes_a_free_port() -> None:
    """Between the answer and the server that listens there."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < ports.NEVER_GIVEN.stop:
        pytest.skip(f"this machine gives ports from {first} on to connections")
    assert all(ports.free_port() < first for _ in range(20))


def test_a_free_port_where_all_of_these_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "NEVER_GIVEN", [port] * 100)
        other = ports.free_port()
    assert other != port
    ports.check_port_free("127.0.0.1", other)
