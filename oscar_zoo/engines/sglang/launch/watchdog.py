"""Ends the server's process group when whoever started it is gone, even by SIGKILL:
`python watchdog.py GROUP`.

Standard input is a pipe whose other end only the starting process holds. A byte on it means that
the group was ended in order; end of file without one means that nobody is left to do so. SGLang's
workers ask the kernel to end them with their parent, but one whose parent died while it was still
importing would stay for ever. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

GRACE_SECONDS = 10.0


def main() -> None:
    """Wait for the pipe; then SIGTERM, a grace period, and SIGKILL to the group."""
    group = int(sys.argv[1])
    if os.read(0, 1):
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
