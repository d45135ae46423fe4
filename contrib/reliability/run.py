"""`make reliability`: run the experiments, print what they find, write docs/reliability.md."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support")]

from experiment import Experiment, Found, Scale  # noqa: E402
from kept import keep, kept  # noqa: E402
from page import Row, page  # noqa: E402
from table import EXPERIMENTS  # noqa: E402

DOCUMENT = ROOT / "docs/reliability.md"
KEPT = ROOT / ".reliability.jsonl"
"""What has ended of a whole run, for `--resume`."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 when a promise did not hold, 0 otherwise."""
    chosen = _parser().parse_args(arguments)
    if chosen.only or chosen.short:
        wanted = [one for one in EXPERIMENTS if not chosen.only or one.name in chosen.only]
        rows = [_run(experiment, whole=not chosen.short) for experiment in wanted]
    else:
        rows = _kept_rows() if chosen.page else _whole_run(resume=chosen.resume)
        DOCUMENT.write_text(page(rows, _facts()), "utf-8")
        print(f"Written: {DOCUMENT}")
    return int(any(row.held == "no" for row in rows))


def _kept_rows() -> list[Row]:
    """The last row of every experiment that has one."""
    found = {row.experiment.name: row for row in kept(KEPT, EXPERIMENTS)}
    return [found[one.name] for one in EXPERIMENTS if one.name in found]


def _whole_run(*, resume: bool) -> list[Row]:
    """Every experiment; those that an earlier run has kept and that held are not repeated."""
    if not resume:
        KEPT.unlink(missing_ok=True)
    earlier = {row.experiment.name: row for row in kept(KEPT, EXPERIMENTS) if row.held == "yes"}
    rows = []
    for experiment in EXPERIMENTS:
        row = earlier.get(experiment.name)
        if row is None:
            row = _run(experiment, whole=True)
            keep(KEPT, row)
        rows.append(row)
    return rows


def _parser() -> argparse.ArgumentParser:
    names = [one.name for one in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, help="write no page")
    parser.add_argument("--short", action="store_true", help="samples; write no page")
    parser.add_argument(
        "--page", action="store_true", help="write the page of what has ended, and run nothing"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that stopped or did not hold"
    )
    return parser


def _run(experiment: Experiment, *, whole: bool) -> Row:
    print(f"{experiment.number} {experiment.name} ...", flush=True)
    began = time.monotonic()
    found: Found | str | None = experiment.lacking()
    if not whole and experiment.instead is not None:
        found = f"`make test` runs {experiment.instead} instead"
    if found is None:
        with tempfile.TemporaryDirectory(prefix="reliability-") as work:
            try:
                found = experiment.run(Scale(Path(work), whole))
            except Exception as error:  # the others still run
                traceback.print_exc()
                found = Found({}, (f"the experiment failed: {type(error).__name__}: {error}",))
    row = Row(experiment, found, time.monotonic() - began, _commit())
    held = {"yes": "held", "no": "DID NOT HOLD", "not run": "not run"}[row.held]
    said = found if isinstance(found, str) else dict(found.figures)
    print(f"{experiment.number} {experiment.name}: {held} ({row.seconds:.0f} s) {said}", flush=True)
    for line in () if isinstance(found, str) else found.violations:
        print(f"  {line}")
    return row


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "?"


def _facts() -> dict[str, str]:
    return {
        "on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "Python": platform.python_version(),
        "Linux": platform.release(),
        "cores": str(os.cpu_count()),
    }


if __name__ == "__main__":
    sys.exit(main())
