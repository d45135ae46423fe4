"""Coverage-guided fuzzing of the reader with atheris, where it is installed.

As a program: `fuzz_coverage.py RUNS CORPUS`. An input is a pickle in a good archive when its first
byte is even, else a whole file.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests/support")]

from experiment import Found, Scale  # noqa: E402

FUZZER = Path(sys.prefix) / "fuzzer"
"""Where `make reliability` puts atheris."""
RUNS = 400_000
LARGEST = 8192
"""Bytes of the largest input."""
MEMORY_MIB = 2048
"""Of the fuzzer, which counts its own books among it."""


def guided(scale: Scale) -> Found:
    """Let coverage lead from good files to bad ones."""
    corpus = scale.work / "corpus"
    corpus.mkdir()
    _seed(corpus)
    seeds = len(list(corpus.iterdir()))
    done = subprocess.run(
        [sys.executable, __file__, str(RUNS), str(corpus)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FUZZER)},
        cwd=scale.work,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=3600,
    )
    last = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    figures: dict[str, int | float | str] = {
        "inputs": RUNS,
        "edges covered at the beginning": int(last[0][0]) if last else 0,
        "edges covered at the end": int(last[-1][0]) if last else 0,
        "inputs that reached something new": len(list(corpus.iterdir())) - seeds,
    }
    if done.returncode == 0:
        return Found(figures)
    crashes = [path.read_bytes()[:200].hex() for path in scale.work.glob("*-*") if path.is_file()]
    return Found(figures, (f"{done.stderr.strip()[-600:]} input {crashes[:1]}",))


def lacking() -> str | None:
    """Why coverage cannot lead here, or `None`."""
    return None if (FUZZER / "atheris").is_dir() else f"atheris is not in {FUZZER}"


def _seed(corpus: Path) -> None:
    from mutants import records_of, small_files

    for number, data in enumerate(small_files()):
        (corpus / f"pickle{number}").write_bytes(b"\0" + records_of(data)[0].content)
        (corpus / f"file{number}").write_bytes(b"\1" + data)


def _fuzz(runs: str, corpus: str) -> None:
    import atheris

    with atheris.instrument_imports(include=["oscar_zoo.artifact"]):
        from hostile_archives import archive
        from mutants import records_of, small_files

        from oscar_zoo.artifact.outcome import Outcome
        from oscar_zoo.artifact.verify import verify_files
    good = small_files()[0]

    def one(data: bytes) -> None:
        content = data[1:]
        if data and data[0] % 2 == 0:
            records = records_of(good)
            records[0].content = content
            content = archive(records)
        outcome = verify_files({"k_rotation.pt": content})
        if not isinstance(outcome, get_args(Outcome)):
            raise AssertionError(f"{outcome!r} is no outcome")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    flags = [f"-runs={runs}", f"-max_len={LARGEST}", "-seed=20261120", "-timeout=10"]
    atheris.Setup([sys.argv[0], *flags, f"-rss_limit_mb={MEMORY_MIB}", corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    _fuzz(*sys.argv[1:])
