"""The keys of the servers that run here: private files beside their records.

Our tools find them there, so that `chat` needs no `--api-key-file`, and `eval --url` may empty the
prefix cache of a server of this user.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import urlsplit

from oscar_zoo.app import server_records
from oscar_zoo.app.server_record import ServerRecord
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.front.addresses import WILDCARDS, is_loopback

SECONDS = 600.0
"""Seconds that one answer may take by default."""


def key_of(record: ServerRecord) -> str | None:
    """What clients of the server must know; `None` when it asks for no key."""
    return _content(server_records.key_file(record))


def client_of(url: str, *, timeout: float = SECONDS, key: str | None = None) -> ServerClient:
    """A client of the server at `url`, which carries the administration key if it is one of ours.

    Args:
        timeout: seconds that one answer may take.
    """
    client = ServerClient(url, timeout=timeout, key=key)
    for record in server_records.running():
        if record.port == client.port and _means(client.host, record):
            found = _content(server_records.administration_key_file(record))
            if found is not None:
                return ServerClient(url, timeout=timeout, key=found)
    return client


def _means(host: str, record: ServerRecord) -> bool:
    """Whether a server of ours answers at `host` and its port."""
    listens = urlsplit(record.url).hostname or ""
    here = host == "localhost" or is_loopback(host)
    return host == listens or (here and (is_loopback(listens) or listens in WILDCARDS))


def _content(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8").strip() or None
    return None
