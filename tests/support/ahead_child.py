"""Compile a kernel in Triton ahead for a GPU that is not here, then ask for it as a launch does,
and print as JSON how often it was compiled."""

import json
import os
from pathlib import Path

import torch

from oscar_kernels import ahead, chips
from oscar_kernels.slots import pack_slots


def main() -> None:
    """Two launches of one variant, compiled by another process, then by this one."""
    with ahead.recording(chips.Target((9, 0), chips.CHIPS[9, 0].shared_bytes, 132)) as recorder:
        for requests in (1, 3):
            pack_slots(
                torch.zeros(8, 64, dtype=torch.int32),
                *(torch.zeros(requests, dtype=torch.int64) for _ in range(2)),
                torch.zeros(requests + 1, dtype=torch.int32),
                torch.zeros(64, dtype=torch.int32),
            )
    failed = ahead.compile_all(recorder.jobs, 1)
    compiled = len(recorder.launches)
    before = set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
    assert len(before) == 1
    for job in recorder.jobs:
        job.code()
    again = set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")) - before
    told = {"failed": failed, "compiled": compiled, "compiled by the launcher": len(again)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
