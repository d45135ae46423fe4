"""S1, S2 and S5: bad files are refused by their own code and run nothing, published ones pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_artifacts
import tiny_artifacts as tiny
from experiment import Found, Scale

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.files import file_digest, read_file
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.registry.catalog import Catalog

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parents[1] / "tests/support/hostile.py"
FILES, CODES = 300, 75
"""The least that the corpus must have."""
SECONDS, MIB = 1.0, 300
"""CPU time and memory of one file."""


def runs_nothing(scale: Scale) -> Found:
    """Verify the corpus of bad files under an audit hook, without torch."""
    count, seen = _output(HERE / "watched_corpus.py")
    few = [f"the corpus has only {count} files"] if count < FILES else []
    return Found({"files": count, "events": len(seen)}, (*few, *seen))


def by_its_code(scale: Scale) -> Found:
    """Verify every bad file in a process of its own with little memory and time."""
    rows = _output(CORPUS)
    violations = [f"{name}: {got} in place of {want}" for name, want, got, _, _ in rows]
    violations = [line for line, row in zip(violations, rows, strict=True) if row[1] != row[2]]
    for name, _, _, seconds, peak in rows:
        if seconds > SECONDS or peak > MIB << 10:
            violations.append(f"{name}: {seconds:.1f} s of CPU and {peak >> 10} MiB")
    names, codes = {row[0] for row in rows}, {row[1] for row in rows}
    if len(names) < max(FILES, len(rows)) or len(codes) < CODES:
        violations.append(f"the corpus has {len(names)} names and {len(codes)} codes")
    figures = {
        "files": len(rows),
        "codes": len(codes),
        "slowest file in milliseconds of CPU": round(1000 * max(row[3] for row in rows)),
        "peak memory in MiB": max(row[4] for row in rows) >> 10,
    }
    return Found(figures, tuple(violations))


def published_files(scale: Scale) -> Found:
    """Verify every published file that is here, with its pinned digest, and write it again."""
    violations, files, pinned = [], 0, 0
    for folder in tiny_artifacts.folders():
        outcome = verify_path(folder, geometry=tiny_artifacts.geometry(folder))
        name = f"{folder.parent.name}/{folder.name}"
        if not isinstance(outcome, Verified) or (outcome.level, outcome.grade) != (
            "numeric",
            "fp64",
        ):
            violations.append(f"{name}: {outcome}")
            continue
        known = Catalog.packaged().seen(ArtifactId.parse(name))
        pinned += known is not None
        if known is not None and known.digest != outcome.digest:
            violations.append(f"{name}: digest {outcome.digest}, pinned {known.digest}")
        for path in sorted(folder.glob("*.pt")):
            files += 1
            wrong = _written_again(path)
            if wrong:
                violations.append(f"{name}/{path.name}: {wrong}")
    figures = {"files": files, "artifacts whose digest is pinned": pinned}
    return Found(figures, tuple(violations))


def _written_again(path: Path) -> str | None:
    """What is lost when our writer writes what was read, or `None`."""
    found = read_rotation(read_file(path), what=path.name)
    again = rotation_bytes(found)
    try:
        tiny.assert_same(read_rotation(again, what="rewritten"), found)
    except AssertionError as error:
        return f"the canonical file differs: {error}"
    if rotation_bytes(read_rotation(again, what="rewritten")) != again:
        return f"{file_digest(path.name, again).sha256} is not written again alike"
    return None


def _output(program: Path) -> Any:
    """What a program of ours prints, as JSON; it has one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(CORPUS.parent)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
