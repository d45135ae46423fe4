"""How workers wait for the process that compiles their kernels ahead (`compile_ahead`), what such a
process needs, and the program that compiles FlashInfer's kernels: `python -m ...`, with a `Wanted`
and the pid of the server as its arguments.

It imports torch only once it would end with the server, and makes no context on the GPU. FlashInfer
locks what it compiles, so a worker that needs it waits, and compiles what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oscar_zoo import children
from oscar_zoo.artifact.specs import Spec
from oscar_zoo.children import Child
from oscar_zoo.models import hardware

logger = logging.getLogger(__name__)

VARIABLE = "OSCAR_ZOO_COMPILING"
"""Environment variable with the path of the lock file."""
PATIENCE = 120.0
"""Seconds that a worker waits, and that compiling ahead may take."""
COMPILER_SAYS = re.compile(r"\b(error|fatal)\s*:")
"""In a line of nvcc, of its assembler, of a host compiler or of ninja that names what is wrong."""
LONGEST = 300
BYTES_TO_COMPILE_ALL = 64 << 30
"""Free memory with which all modules are compiled at once, some 16 compilers of up to 4 GB."""
GIVES_UP = 900
"""Seconds after which FlashInfer is not compiled any longer, and a worker begins."""
PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def held() -> Iterator[tuple[int, Path]]:
    """A new lock file that the block holds, and that every process which inherits the descriptor
    goes on to hold, until all of them have ended, whatever ended them. Correctness never depends on
    it: a worker that does not wait compiles for itself."""
    descriptor, name = tempfile.mkstemp(prefix="oscar-zoo-compiling-")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor, Path(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def wait() -> None:
    """Return when nobody compiles ahead for this server any more, or after `PATIENCE`."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        descriptor = os.open(name, os.O_RDONLY)
    except OSError:  # it has ended
        return
    try:
        if _free(descriptor, time.monotonic() + PATIENCE):
            Path(name).unlink(missing_ok=True)
        else:
            logger.warning("INT2 KV cache: kernels are compiled here, because others are too slow")
    finally:
        os.close(descriptor)


def _free(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError:
            return True


def errors() -> int | None:
    return None if os.environ.get("OSCAR_ZOO_DEBUG") == "1" else subprocess.DEVNULL


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Get this signal when the thread that started this process ends, and end at once if its
    process has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the server has ended")


def cause(error: Exception) -> str:
    """What an error says, in one short line. The output of a whole build may be in it; what counts
    there is the first line that a compiler calls an error."""
    lines = str(error).strip().splitlines() or [""]
    told = next((line for line in lines if COMPILER_SAYS.search(line)), lines[0])
    return f"{type(error).__name__}: {told.strip()[:LONGEST]}"


def say(text: str) -> None:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"[{now}] INT2 KV cache: {' '.join(text.split())}", flush=True)


class Wanted(Spec):
    gpu: int  # number among the visible GPUs
    head_dims: tuple[int, int]  # channels of K and of V
    dtype: str  # of the model, such as `bfloat16`
    capped: bool  # whether logits have a cap


def spawn(wanted: Wanted) -> Child[bytes] | None:
    """Start the program, if FlashInfer has the heads. It ends with this process."""
    from oscar_zoo.runtime import prefill

    if wanted.head_dims not in prefill.HEADS:
        return None
    process = children.start(
        children.python("-m", __name__, wanted.model_dump_json(), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stderr=errors(),
        start_new_session=True,
    )
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end_compilers)
    end_with_parent(signal.SIGTERM, parent=int(sys.argv[2]))
    signal.alarm(GIVES_UP)
    began = time.monotonic()
    try:
        wanted = Wanted.model_validate_json(sys.argv[1])
        count = compile_missing(wanted)
    except Exception as error:  # a worker compiles for itself, and says what is wrong
        say(f"FlashInfer's kernels are not compiled ahead ({cause(error)})")
        raise
    if count:
        seconds = time.monotonic() - began
        say(f"{count} modules of FlashInfer were compiled ahead in {seconds:.1f} s")


def compile_missing(wanted: Wanted) -> int:
    """Compile what no earlier start has left; returns how many modules that were."""
    import torch

    from oscar_zoo.runtime import prefill

    device = torch.device("cuda", wanted.gpu)
    modules = prefill.modules(
        wanted.head_dims, getattr(torch, wanted.dtype), capped=wanted.capped, device=device
    )
    missing = [x for x in modules if not (x.is_aot or x.jit_library_path.exists())]
    if missing:
        enough = hardware.available_ram() >= BYTES_TO_COMPILE_ALL
        with ThreadPoolExecutor(len(missing) if enough else 1) as pool:
            list(pool.map(lambda module: module.build(verbose=False), missing))
    return len(missing)


def _end_compilers(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)  # with this process


if __name__ == "__main__":
    main()
