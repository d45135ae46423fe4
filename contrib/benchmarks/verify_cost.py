"""CPU seconds and memory of `verify` on the most expensive files, each in a process of its own.

    python contrib/benchmarks/verify_cost.py

Refused files come from the corpus of `tests/support`, accepted ones are random transforms of large
models. BLAS uses every core, so CPU seconds of an accepted file can be above its wall seconds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[2] / "tests/support"
sys.path.insert(0, str(SUPPORT))

import hostile  # noqa: E402
import numpy as np  # noqa: E402

from oscar_zoo.artifact.files import MAX_PAYLOAD_BYTES, read_file  # noqa: E402
from oscar_zoo.artifact.formats import LayerTransform, RotationSet  # noqa: E402
from oscar_zoo.artifact.verify import verify_files  # noqa: E402
from oscar_zoo.artifact.writer import rotation_bytes  # noqa: E402

EXPENSIVE = ("dicts-many", "dicts-many-short", "tuples-many", "tuples-many-short", "stack-deep")
HONEST = {
    "36 layers x 128": (36, 0, 128, False),
    "64 layers x 256": (64, 0, 256, False),
    "94 layers x 4 heads x 128": (94, 4, 128, False),
    "32 layers x 64 heads x 128": (32, 64, 128, False),
    "32 layers x 32 heads x 128, partners": (32, 32, 128, True),
    "40 layers x 40 heads x 128, partners": (40, 40, 128, True),
    "16 layers x 1024": (16, 0, 1024, False),
}
"""Name -> layers, heads (0: one matrix for all), channels, and whether they are not orthogonal."""


def honest(layers: int, heads: int, d: int, partnered: bool) -> bytes:
    """A file of random transforms as large as that of a real model."""
    rng = np.random.default_rng(0)
    shape = (heads,) if heads else ()
    found = []
    for layer in range(layers):
        forward = np.linalg.qr(rng.standard_normal((*shape, d, d)))[0]
        scale = np.exp(rng.uniform(-1, 1, (*shape, 1, d)))
        values = np.sort(rng.uniform(1, 9, (*shape, d)), axis=-1).astype(np.float32)
        matrix = (forward * scale if partnered else forward).astype(np.float32)
        other = (forward / scale).astype(np.float32) if partnered else matrix
        found.append(LayerTransform(layer, matrix, other, eigenvalues=values))
    if partnered:
        kind = (3, "wush_k", "kv_head", "wush", False, False, tuple(found), {}, "k")
        return rotation_bytes(RotationSet(*kind))  # type: ignore[arg-type]
    grouping = "kv_head" if heads else "layer"
    version = 2 if heads else 1
    return rotation_bytes(
        RotationSet(version, "qqt_r_h_pbr", grouping, "oscar", True, False, tuple(found))  # type: ignore[arg-type]
    )


def child(path: str) -> None:
    """Verify one file and print what that cost."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    outcome = verify_files({"k_rotation.pt": read_file(Path(path), max_bytes=MAX_PAYLOAD_BYTES)})
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1000
    print(json.dumps([hostile.code_of(outcome), cpu, wall, peak]))


def measure(name: str, data: bytes, folder: Path) -> None:
    """One row of the table."""
    path = folder / "file.pt"
    path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, __file__, str(path)], capture_output=True, text=True, check=True
    )
    code, cpu, wall, peak = json.loads(done.stdout)
    size = len(data) / 1e6
    print(f"{name:38} {size:8.1f} MB  {code:16} {cpu:6.2f} s CPU {wall:6.2f} s {peak:6.0f} MB")


def main() -> None:
    """Print the table."""
    corpus = {name: data for name, _, data in hostile.corpus()}
    with tempfile.TemporaryDirectory() as folder:
        for name in EXPENSIVE:
            measure(name, corpus[name], Path(folder))
        measure("1,000 layers of one matrix", hostile.shared_record(), Path(folder))
        for name, shape in HONEST.items():
            measure(name, honest(*shape), Path(folder))


if __name__ == "__main__":
    child(sys.argv[1]) if len(sys.argv) > 1 else main()
