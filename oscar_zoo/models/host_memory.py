"""Main memory: what is free for this process, on the machine and in the control groups around it.
Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Control groups of the first version say such numbers where there is no limit."""


def available_ram(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Main memory that is free without swapping, in bytes.

    It is the least of what the machine and every control group around this process allow.
    """
    free = [_kilobytes(proc / "meminfo", "MemAvailable"), *_left_in_groups(proc, cgroup)]
    known = [one for one in free if one is not None]
    return (
        min(known)
        if known
        else int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    )


def resident_set() -> int:
    """Bytes of main memory that this process holds."""
    return _kilobytes(PROC / "self/status", "VmRSS") or 0


def _kilobytes(path: Path, name: str) -> int | None:
    for line in _lines(path):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(proc: Path, cgroup: Path) -> Iterator[int]:
    """Bytes that each group may still take; file pages that it could give back count as free."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, inside = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = cgroup / "memory" if controllers else cgroup
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        group = top / inside.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < UNLIMITED:
                yield max(0, limit - used + _file_pages(folder / "memory.stat"))
            if folder == top:
                break


def _file_pages(stat: Path) -> int:
    counts = dict(line.split(" ", 1) for line in _lines(stat) if " " in line)
    return sum(
        int(counts.get(name, counts.get(f"total_{name}", "0")))
        for name in ("active_file", "inactive_file")
    )


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or a kind of group that is not used
        return []
