"""What the programs that compile ahead share. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Get this signal when the thread that started this process ends, and end at once if its
    process has ended already.

    Args:
        parent: pid of the process that started this one.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the server has ended")


def say(text: str) -> None:
    """Write a line to the log of the server."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"[{now}] INT2 KV cache: {' '.join(text.split())}", flush=True)
