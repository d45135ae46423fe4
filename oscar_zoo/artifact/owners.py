"""Whose a temporary name is: the process that made it, and whether that process still runs.

A process is known by its number, its start time, and the place where the number counts: the boot of
the machine and the namespace of process numbers, since a container has numbers of its own. Of a
process of another place nothing is known here.
"""

from __future__ import annotations

import os
import re
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Literal

from oscar_zoo.artifact.digest import sha256_hex

TEMP_PREFIX = ".tmp."
_PROC = Path("/proc")
_NAME = re.compile(
    re.escape(TEMP_PREFIX) + r"(?:([0-9a-f]{8})\.([1-9][0-9]{0,9})\.([0-9]{1,20})\.)?[0-9a-f]{32}"
)
Life = Literal["alive", "dead", "unknown"]


def temp_name() -> str:
    """A fresh name that says which process made it."""
    place, start = _place(), _start(os.getpid())
    owner = f"{place}.{os.getpid()}.{start}." if place and start else ""
    return f"{TEMP_PREFIX}{owner}{uuid.uuid4().hex}"


def is_ours(name: str) -> bool:
    """Whether `temp_name` made `name`, in this version or an earlier one."""
    return _NAME.fullmatch(name) is not None


def life_of(name: str) -> Life:
    """Whether the process that made `name` still runs."""
    found = _NAME.fullmatch(name)
    if found is None or found[1] is None or found[1] != _place():
        return "unknown"
    start = _start(int(found[2]))
    if start is None:  # gone, or a system without such files, where `_place` is empty
        return "dead"
    return "alive" if start == found[3] else "dead"


@lru_cache(maxsize=1)
def _place() -> str:
    """Eight hex digits for where numbers of processes count; empty where that is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_bytes()
        numbers = os.readlink(_PROC / "self/ns/pid").encode()  # noqa: PTH115
    except OSError:
        return ""
    return sha256_hex(boot + numbers)[:8]


def _start(pid: int) -> str | None:
    """When the process began, in ticks since the boot; `None` when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("ascii", "replace")
    except FileNotFoundError:
        return None
    except OSError:  # gone while it was read
        return None
    return text.rpartition(")")[2].split()[19]
