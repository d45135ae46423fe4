"""What the programs that compile ahead share. Standard library only."""

from __future__ import annotations

import ctypes
import signal
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Get this signal when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def say(text: str) -> None:
    """Write a line to the log of the server."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"[{now}] INT2 KV cache: {' '.join(text.split())}", flush=True)
