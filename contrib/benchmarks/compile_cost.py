"""CPU seconds that each kernel of a server takes to compile, for a GPU that need not be here.

    python contrib/benchmarks/compile_cost.py [--chip 9.0] [--head-dim 128] [--one-each]

The worker is that of Qwen3-8B: 32 query heads and 8 KV heads. Every kernel is compiled alone, and
CPU seconds count those of its assembler too, so the numbers hold on a machine with other work.
Behind a kernel in Triton stand its bytes of shared memory. The status is 1 where a block of the
chip has less. `--one-each` compiles one variant of each kernel.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from cache_oracle import general_set

from oscar_kernels import chips
from oscar_kernels.ahead import Job, Launch
from oscar_kernels.nvrtc import Build
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.transforms import TransformTable

HEADS, Q_HEADS, MULTIPROCESSORS = 8, 32, 132


def main() -> None:
    """Print one line for each kernel, and the sum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chip", default="9.0")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--one-each", action="store_true")
    given = parser.parse_args()
    dim, (major, minor) = given.head_dim, map(int, given.chip.split("."))
    worker = rehearsal.Worker(
        specs=((QuantSpec(dim, dim, 0.96, "float16"), QuantSpec(dim, dim, 0.92, "float16")),),
        num_q_heads=Q_HEADS,
        num_kv_heads=HEADS,
        sink=64,
        recent=256,
        dtype="bfloat16",
        cap=0.0,
        learned_sinks=False,
        drafts=given.drafts,
        tree=True,
        requests=72,
        max_tokens=40960,
    )
    sets = [general_set(role, 1, HEADS, dim, seed=1) for role in ("k", "v")]
    transforms = TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device="cpu")
    shared = chips.CHIPS[major, minor].shared_bytes
    target = chips.Target((major, minor), shared, MULTIPROCESSORS)
    began = _seconds()
    jobs = rehearsal.jobs(worker, transforms, target)
    print(f"{_seconds() - began:5.1f}  finding them")
    if given.one_each:
        jobs = [*{_name(job): job for job in reversed(jobs)}.values()]
    costs, most = [], 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OSCAR_KERNELS_CACHE"] = os.environ["TRITON_CACHE_DIR"] = folder
        for job in jobs:
            began = _seconds()
            made = job.code()
            costs.append(_seconds() - began)
            used = made.metadata.shared if isinstance(job, Launch) else 0
            most = max(most, used)
            print(
                f"{costs[-1]:5.1f}  {_name(job)}{f', {used:,} bytes' if used else ''}", flush=True
            )
    print(f"{sum(costs):5.1f}  all {len(costs)}, the longest {max(costs):.1f}")
    if most > shared:
        raise SystemExit(f"{most:,} bytes of shared memory, of which a block has {shared:,}")


def _name(job: Job) -> str:
    if isinstance(job, Build):
        return f"{job.source.main} (NVRTC)"
    return f"{job.kernel.__name__} (Triton)" if isinstance(job, Launch) else str(job)


def _seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
