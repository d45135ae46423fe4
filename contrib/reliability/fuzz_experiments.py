"""S3 and S4: mutants of good files are read without harm, and what is accepted is what torch reads.

The processes run beside each other, each with little memory; see `fuzz_child`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_artifacts
from experiment import Found, Scale

CHILD = Path(__file__).with_name("fuzz_child.py")
MANY, FEW = 1_000_000, 10_000
REAL = 8_000
"""Mutants of published files, which are a thousand times larger."""
COMPARED = 60_000
"""Accepted mutants that torch.load reads, too, in the long form."""
CHUNK = 25_000
SECONDS = 1200
"""Patience with one process."""


@dataclass
class Batch:
    """Mutants `first` to `end` of `files` (the small ones when there are none)."""

    first: int
    end: int
    files: Sequence[Path] = ()
    accepted: list[int] = field(default_factory=list)


def never_harmful(scale: Scale) -> Found:
    """Read a million mutants: no crash, no hang, little memory, one of five outcomes."""
    batches = list(_batches(scale))
    told, violations = _all(scale, "read", batches)
    codes: Counter[str] = Counter()
    for one in told:
        codes.update(one["codes"])
    figures: dict[str, int | float | str] = {
        "inputs": codes.total(),
        "inputs made from published files": sum(b.end - b.first for b in batches if b.files),
        "different outcomes": len(codes),
        "accepted by the reader": sum(len(one["accepted"]) for one in told),
        "slowest input in milliseconds of CPU": round(1000 * max(one["worst"] for one in told)),
        "peak memory in MiB": max(one["peak_kib"] for one in told) >> 10,
    }
    return Found(figures, violations)


def as_torch_reads(scale: Scale) -> Found:
    """Read every accepted mutant with torch.load, too: the same numbers, bit for bit."""
    batches = list(_batches(scale, COMPARED * 6 if scale.whole else FEW // 2))
    told, violations = _all(scale, "read", batches)
    for batch, one in zip(batches, told, strict=True):
        batch.accepted = one["accepted"]
    compared, differences = _all(scale, "compare", batches)
    count = sum(one["compared"] for one in compared)
    if count < (5_000 if scale.whole else 100):
        differences += (f"only {count} files could be compared",)
    return Found({"accepted files compared": count}, violations + differences)


def _batches(scale: Scale, count: int | None = None) -> Iterator[Batch]:
    count = count or (MANY if scale.whole else FEW)
    chunk = min(CHUNK, count // _cores())
    for first in range(0, count, chunk):
        yield Batch(first, min(count, first + chunk))
    if scale.whole:
        files = [
            path for folder in tiny_artifacts.folders() for path in sorted(folder.glob("*.pt"))
        ]
        part = REAL // 4
        yield from (Batch(n, n + part, files) for n in range(0, REAL if files else 0, part))


def _all(
    scale: Scale, task: str, batches: Sequence[Batch]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """What the processes say, and what did not hold."""
    with ThreadPoolExecutor(_cores()) as pool:
        told = list(pool.map(lambda batch: _one(scale.work, task, batch), batches))
    return told, tuple(line for one in told for line in one["violations"])


def _one(work: Path, task: str, batch: Batch) -> dict[str, Any]:
    kind = "published" if batch.files else "small"
    progress = work / f"{task}-{kind}-{batch.first}"
    words = [task, progress, batch.first, batch.end, *batch.files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, CHILD, *map(str, words)],
            env=environment,
            input=json.dumps(batch.accepted),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        ended = f"ended with {done.returncode}: {done.stderr[-300:]}"
        if done.returncode == 0:
            return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        ended = f"did not end in {SECONDS} s"
    number = struct.unpack("q", progress.read_bytes())[0] if progress.exists() else -1
    line = f"the process at mutant {number} of {kind} files {ended}"
    nothing = {"codes": {}, "accepted": [], "worst": 0.0, "peak_kib": 0, "compared": 0}
    return {**nothing, "violations": [line]}


def _cores() -> int:
    return min(2, os.cpu_count() or 1)


def lacking_torch() -> str | None:
    """Why nothing can be compared, or `None`."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"
