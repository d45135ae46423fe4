"""Whether models and data can be fetched from Hugging Face now, asked once, before its client tries
again and again.

Without a network the client waits 20 seconds and prints a line for every attempt, also for a model
that is on this machine. One attempt to connect gives the same answer within `SECONDS`.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from oscar_zoo.errors import NetworkError, go_online

SECONDS = 3.0
"""How long connecting may take, with the resolution of the name. On a slow network, a larger
`HF_HUB_ETAG_TIMEOUT` replaces it."""
ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "on", "yes", "true")
_PORTS = {"http": 80, "https": 443}


def unreachable() -> str | None:
    """Why Hugging Face cannot be reached, in a few words, or `None` when it can be, or need not
    be."""
    if _offline() or getproxies().keys() & {"http", "https", "all"}:
        return None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # else every further try is a line
    return _connect((os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/"))


def check_fetchable(source: str, revision: str | None = None) -> None:
    """Refuse a model that is not on this machine while no hub can be asked; imports no torch."""
    if is_here(source, revision):
        return
    if _offline():
        message = f"{source} is not on this machine, and offline mode asks no hub."
        raise NetworkError(message, hint=f"{go_online()}, or give a local folder")
    trouble = unreachable()
    if trouble is not None:
        raise incomplete(source, trouble)


def incomplete(source: str, trouble: str) -> NetworkError:
    why = f"and Hugging Face cannot be reached: {trouble}"
    hint = "check the network, or give a local folder"
    return NetworkError(f"{source} is not complete on this machine, {why}.", hint=hint)


@contextmanager
def without_retries() -> Iterator[str | None]:
    """Let the client of Hugging Face find only what is on this machine while the body runs, where
    `unreachable`, whose answer it gives; else it would try again and again."""
    trouble = unreachable()
    if trouble is None:
        yield None
        return
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield trouble
    finally:
        constants.HF_HUB_OFFLINE = before


def search_limits() -> dict[str, bool]:
    """Arguments of `from_pretrained` that keep it from asking a hub which cannot be reached."""
    return {"local_files_only": True} if unreachable() is not None else {}


def is_here(source: str, revision: str | None = None) -> bool:
    """Whether the model is a folder, or at least part of it is in the cache of the client."""
    return Path(source).is_dir() or kept_config(source, revision) is not None


def kept_config(source: str, revision: str | None = None) -> Path | None:
    """The folder in the cache of the client that holds the `config.json`; no hub is asked."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(source, "config.json", revision=revision)
    except ValueError:  # it cannot be the id of a model there
        return None
    return Path(found).parent if isinstance(found, str) else None


def offers_only_gguf(source: str) -> bool:
    """Whether the weights of a model on Hugging Face are GGUF files alone, as far as it tells."""
    from huggingface_hub import list_repo_files

    try:
        ends = {name.rpartition(".")[2] for name in list_repo_files(source)}
    except Exception:  # not public types; that the model cannot be loaded was known before
        return False
    return "gguf" in ends and "safetensors" not in ends


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in _TRUE


@cache
def _connect(endpoint: str) -> str | None:
    """Try once, name resolution included; a resolver may take much longer than a connection, so the
    attempt runs in a thread that nobody waits for."""
    patience = _patience()
    answers: queue.Queue[str | None] = queue.Queue()
    threading.Thread(
        target=lambda: answers.put(_attempt(endpoint, patience)), daemon=True, name="reach-hub"
    ).start()
    try:
        return answers.get(timeout=patience)
    except queue.Empty:
        return f"no connection within {patience:g} s"


def _attempt(endpoint: str, patience: float) -> str | None:
    try:
        parts = urlsplit(endpoint)
        port = parts.port or _PORTS.get(parts.scheme, 443)
        socket.create_connection((parts.hostname or "", port), timeout=patience).close()
    except TimeoutError:
        return f"no connection within {patience:g} s"
    except socket.gaierror:
        return "its name cannot be resolved"
    except ConnectionRefusedError:
        return "connection refused"
    except (OSError, ValueError):
        return "no connection"
    return None


def _patience() -> float:
    try:
        return max(SECONDS, float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "")))
    except ValueError:
        return SECONDS
