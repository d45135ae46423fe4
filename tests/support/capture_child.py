"""Captures in processes that may be killed: `python capture_child.py JOB.json`.

A job is a list of captures of one small model, run one after the other. Each names `family`,
`lengths` (of its random sequences), `out` (where the sums are written), `passes` (force the
engine that runs the model whole), and for checkpoints `work`, `resume`, and one way to end early:
- `kill_at`: SIGKILL at that progress report, in a forked process, so that the next capture of the
  list still runs;
- `kill_in_save`: `[n, "before" or "after"]`, SIGKILL around the n-th replacement of the state;
- `stop_at`: KeyboardInterrupt at that progress report.
The exit codes of all captures go to `JOB.json.codes`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import build, sequences

from oscar_zoo.artifact import durable
from oscar_zoo.compute.capture import checkpoint, passes
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.moments import Moments

NEEDS = frozenset(("rows", "weighted", "outputs", "weights"))
SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo", "sst_num", "sst_den", "wo")
COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens")


def main() -> None:
    torch.set_num_threads(1)  # a process with more threads cannot be forked
    place = Path(sys.argv[1])
    codes = []
    for job in json.loads(place.read_text()):
        if "kill_at" in job or "kill_in_save" in job:
            if (child := os.fork()) == 0:
                run(job)
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            run(job)
            codes.append(0)
    Path(f"{place}.codes").write_text(json.dumps(codes))


def run(job: dict[str, Any]) -> None:
    passes.MEMORY_SHARE = 0.0 if job.get("passes") else 0.6
    checkpoint.LARGEST = job.get("largest", 256 << 20)
    checkpoint.MIN_SECONDS, checkpoint.SHARE = 0.0, 0
    if "kill_in_save" in job:
        kill_in_save(*job["kill_in_save"])
    loaded = build(job["family"], torch.float32)
    data = sequences(*job["lengths"], seed=job.get("seed", 0))
    work = Path(job["work"]) if "work" in job else None
    try:
        moments = capture(
            loaded,
            data,
            needs=NEEDS,
            progress=Reports(job),
            work=work,
            resume=job.get("resume", False),
        )
    except KeyboardInterrupt:
        return
    write(Path(job["out"]), moments)


class Reports:
    """Progress that ends this process, or this capture, at a given report."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.seen, self.kill_at, self.stop_at = 0, job.get("kill_at"), job.get("stop_at")
        self.log = Path(job["log"]) if "log" in job else None

    def __call__(self, done: int, total: int) -> None:
        self.seen += 1
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{done} {total}\n")
        if self.seen == self.kill_at:
            die()
        if self.seen == self.stop_at:
            raise KeyboardInterrupt


def kill_in_save(number: int, when: str) -> None:
    replace, calls = durable.replace_file, 0

    def counted(path: Path, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            die()
        replace(path, data)
        if calls == number:
            die()

    durable.replace_file = counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(path: Path, moments: Moments) -> None:
    """Every sum and count under `LAYER.NAME`."""
    moments.check(NEEDS)
    tensors = {
        f"{i}.{name}": getattr(one, name) for i, one in moments.layers.items() for name in SUMS
    }
    for i, one in moments.layers.items():
        tensors[f"{i}.counts"] = torch.tensor([getattr(one, name) for name in COUNTS])
    save_file(tensors, path)


if __name__ == "__main__":
    main()
