"""Whether a process still runs, by its number."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it may also go while this reads
        return False
    return status.rpartition(") ")[2][0] != "Z"
