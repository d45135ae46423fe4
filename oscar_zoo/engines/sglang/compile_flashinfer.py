"""The program that compiles FlashInfer's kernels of a server ahead: `python -m ...`, with a
`Wanted` and the pid of the server as its arguments.

It imports torch only once it would end with the server. It runs beside `compile_program`, in a
process group of its own, and makes no context on the GPU. FlashInfer locks what it compiles, so a
worker that needs it waits, and compiles what is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from oscar_zoo import children
from oscar_zoo.children import Child
from oscar_zoo.engines.sglang.compile_child import cause, end_with_parent, say
from oscar_zoo.engines.sglang.worker_errors import DEBUG
from oscar_zoo.models import hardware

BYTES_TO_COMPILE_ALL = 64 << 30
"""Free memory with which all modules are compiled at once, some 16 compilers of up to 4 GB."""
PATIENCE = 900
"""Seconds after which it gives up, and a worker begins."""


@dataclass(frozen=True)
class Wanted:
    """What to compile.

    Attributes:
        gpu: number among the visible GPUs.
        head_dims: channels of K and of V.
        dtype: of the model, such as `bfloat16`.
        capped: whether logits have a cap.
    """

    gpu: int
    head_dims: tuple[int, int]
    dtype: str
    capped: bool

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """From `str`."""
        found = json.loads(text)
        return cls(**{**found, "head_dims": tuple(found["head_dims"])})

    def __str__(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def spawn(wanted: Wanted) -> Child[bytes] | None:
    """Start the program, if FlashInfer has the heads. It ends with this process."""
    from oscar_zoo.runtime import flashinfer_prefill

    if wanted.head_dims not in flashinfer_prefill.HEADS:
        return None
    process = children.start(
        children.python("-m", __name__, str(wanted), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stderr=None if os.environ.get(DEBUG) == "1" else subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def main() -> None:
    """Compile what is missing, and say in one line how long it took."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end_compilers)
    end_with_parent(signal.SIGTERM, parent=int(sys.argv[2]))
    signal.alarm(PATIENCE)
    began = time.monotonic()
    try:
        wanted = Wanted.parse(sys.argv[1])
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

    from oscar_zoo.runtime import flashinfer_prefill

    device = torch.device("cuda", wanted.gpu)
    modules = flashinfer_prefill.modules(
        wanted.head_dims, getattr(torch, wanted.dtype), capped=wanted.capped, device=device
    )
    missing = [x for x in modules if not (x.is_aot or x.jit_library_path.exists())]
    if missing:
        enough = hardware.available_ram() >= BYTES_TO_COMPILE_ALL
        with ThreadPoolExecutor(len(missing) if enough else 1) as pool:
            list(pool.map(_build, missing))
    return len(missing)


def _build(module: Any) -> None:
    module.build(verbose=False)


def _end_compilers(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)  # with this process


if __name__ == "__main__":
    main()
