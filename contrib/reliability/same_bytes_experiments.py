"""S17: the same input gives the same bytes, in another process and at another time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import tiny_artifacts
from experiment import Found, Scale
from mutants import GOLDEN

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
METHODS = ("oscar", "oscar-per-head", "wush", "hadamard")
FIT = ("--calib-tokens", "1024", "--seq-len", "256", "--device", "cpu", "--dtype", "float32")
WRITE = """
import hashlib, pathlib, sys
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.writer import rotation_bytes
for name in sys.argv[1:]:
    data = rotation_bytes(read_rotation(pathlib.Path(name).read_bytes(), what=name))
    print(hashlib.sha256(data).hexdigest())
"""


def reproducible(scale: Scale) -> Found:
    """Write files again in other processes; in the long form, compute every method twice."""
    published = [
        path for folder in tiny_artifacts.folders() for path in sorted(folder.glob("*.pt"))
    ]
    files = [*sorted(GOLDEN.rglob("*.pt")), *published]
    written = [_written(files, seed) for seed in range(3 if scale.whole else 2)]
    violations = [
        f"{path}: {sorted(set(sums))}"
        for path, *sums in zip(files, *written, strict=True)
        if len(set(sums)) > 1
    ]
    for path, one in zip(files, written[0], strict=True):
        if GOLDEN in path.parents and one != hashlib.sha256(path.read_bytes()).hexdigest():
            violations.append(f"{path.name} of an older version is written in another way")
    figures = {"files written again": len(files), "processes": len(written)}
    if scale.whole:
        for method in METHODS:
            first, second = (_computed(scale.work / f"{method}{run}", method) for run in (1, 2))
            different = [name for name in first if first[name] != second.get(name)]
            violations += [f"{method}: {name} differs" for name in different]
        figures["methods computed twice"] = len(METHODS)
    return Found(figures, tuple(violations))


def _written(files: list[Path], seed: int) -> list[str]:
    """sha256 of every file as a new process writes it."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(1 + seed)}
    command = [sys.executable, "-c", WRITE, *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _computed(folder: Path, method: str) -> dict[str, str]:
    """sha256 of the rotations and statistics that `compute` makes in a new process."""
    command = ["-m", "oscar_zoo", "compute", str(MODEL), "--method", method, *FIT]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, *command, "--output-dir", str(folder), "--allow-poor", "--quiet"],
        env=environment,
        capture_output=True,
        check=True,
    )
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "oscar.json"
    }
