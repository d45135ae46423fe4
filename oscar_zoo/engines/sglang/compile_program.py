"""The program that compiles the kernels of a server ahead: `python -m ...`, with the pid of the
server, and a `Request` on its standard input.

It reads the artifact as the server does, from the same variables. It makes no context on the GPU,
so it takes none of its memory.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict, dataclass

from oscar_kernels import ahead, nvrtc
from oscar_kernels.chips import Target
from oscar_kernels.spec import QuantSpec
from oscar_zoo.engines.sglang import compile_lock, served_artifact, worker
from oscar_zoo.engines.sglang.compile_child import cause, end_with_parent, say
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.transforms import TransformTable


@dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
        gpu: number among the visible GPUs.
        layers: global id of a layer for each of `worker.specs`.
        worker: shapes of a worker.
    """

    gpu: int
    layers: tuple[int, ...]
    worker: rehearsal.Worker

    @classmethod
    def parse(cls, text: str) -> Request:
        """From `str`."""
        found = json.loads(text)
        worker = found["worker"]
        specs = tuple((QuantSpec(**k), QuantSpec(**v)) for k, v in worker["specs"])
        return cls(
            found["gpu"], tuple(found["layers"]), rehearsal.Worker(**{**worker, "specs": specs})
        )

    def __str__(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def jobs(
    request: Request, artifact: served_artifact.ServedArtifact, target: Target
) -> list[ahead.Job]:
    """What a worker of the server compiles on `target`."""
    heads = range(request.worker.num_kv_heads)
    transforms = TransformTable.build(
        artifact.k, artifact.v, request.layers, kv_heads=heads, device="cpu"
    )
    return rehearsal.jobs(request.worker, transforms, target)


def main() -> None:
    """Compile everything, and say in one line how it went."""
    end_with_parent(signal.SIGKILL, parent=int(sys.argv[1]))
    request = Request.parse(sys.stdin.read())
    signal.alarm(int(compile_lock.PATIENCE))
    began = time.monotonic()
    try:
        wanted = jobs(request, worker.served()[1], nvrtc.target(request.gpu))
        failed = ahead.compile_all(wanted)
    except Exception as error:  # workers compile for themselves, and say what is wrong
        say(f"nothing is compiled ahead ({cause(error)})")
        raise
    say(f"{len(wanted)} kernels were compiled ahead in {time.monotonic() - began:.1f} s")
    for line in failed:
        say(f"one of them was not ({line})")


if __name__ == "__main__":
    main()
