"""What the programs that compile ahead share. Standard library only."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
COMPILER_SAYS = re.compile(r"\b(error|fatal)\s*:")
"""In a line of nvcc, of its assembler, of a host compiler or of ninja that names what is wrong."""
LONGEST = 300
"""Characters of an error that are told."""


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Get this signal when the thread that started this process ends, and end at once if its
    process has ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the server has ended")


def cause(error: Exception) -> str:
    """What an error says, in one short line.

    The output of a whole build may be in it; what counts there is the first line that a compiler
    calls an error.
    """
    lines = str(error).strip().splitlines() or [""]
    told = next((line for line in lines if COMPILER_SAYS.search(line)), lines[0])
    return f"{type(error).__name__}: {told.strip()[:LONGEST]}"


def say(text: str) -> None:
    """Write a line to the log of the server."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"[{now}] INT2 KV cache: {' '.join(text.split())}", flush=True)
