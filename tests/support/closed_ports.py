"""Ports on which nobody listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of loopback on which nobody listens, and which nobody gets while the block runs."""
    with socket.socket() as bound:  # never listening
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])
