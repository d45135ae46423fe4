"""The store by which the workers of one machine find each other, on loopback alone.

torch listens on every interface, whatever address it is given, and its store obeys everybody who
connects.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

INTERFACE = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Which interface the processes of a group talk over."""
WAITING = 128


def use_loopback() -> None:
    """Let worker processes that are started later talk over loopback, unless the user chose an
    interface."""
    if Path("/sys/class/net", INTERFACE).exists():
        for variable in VARIABLES:
            os.environ.setdefault(variable, INTERFACE)


def means_loopback(method: str) -> bool:
    """Whether a rendezvous, such as `tcp://127.0.0.1:29500`, is on loopback."""
    try:
        return ipaddress.ip_address(urlsplit(method).hostname or "").is_loopback
    except ValueError:
        return urlsplit(method).hostname == "localhost"


def bind_stores() -> None:
    """From now on, stores of this process that are on loopback listen there and nowhere else."""
    import torch.distributed

    stock = torch.distributed.TCPStore
    if getattr(stock, "oscar_loopback", False):
        return
    ours = _loopback_store(stock)
    for name in ("torch.distributed", "torch.distributed.rendezvous"):
        module = sys.modules[name]
        if getattr(module, "TCPStore", None) is stock:
            module.TCPStore = ours  # type: ignore[attr-defined]


def _loopback_store(stock: Any) -> Any:
    class LoopbackStore(stock):  # type: ignore[misc]
        """torch's store, which takes a socket that listens."""

        oscar_loopback = True

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *given: Any,
            **named: Any,
        ) -> None:
            if is_master and means_loopback(f"tcp://{host_name}"):
                listening = _listening(host_name, port, any_port=world_size == 1)
                named["master_listen_fd"], port = listening
            super().__init__(host_name, port, world_size, is_master, *given, **named)

    return LoopbackStore


def _listening(host: str, port: int, *, any_port: bool) -> tuple[int, int]:
    """The number of a socket that listens on loopback, which torch closes, and its port.

    Args:
        any_port: take another port where this one is taken. It was chosen before it is bound, so
            another process can be faster; nobody else must know it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen(WAITING)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not any_port:
                raise
        else:
            port = found.getsockname()[1]
            return found.detach(), port
    return _listening(host, 0, any_port=False)
