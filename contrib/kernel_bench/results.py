"""CSV rows that describe themselves, because a number without its GPU, versions and commit is
useless later."""

from __future__ import annotations

import csv
import importlib.metadata
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import roofline
import torch
from timing import Timing

from oscar_kernels import nvrtc

FORMATS = {"microseconds": ".2f", "p20": ".2f", "p80": ".2f", "share": ".3f", "bandwidth": ".4g"}


@dataclass(frozen=True)
class ResultRow:
    """One measurement.

    Attributes:
        op, case, kernel: what was run, on which shapes, by which implementation.
        microseconds, p20, p80: of one layer: median and percentiles over replays.
        bytes: that must move (`roofline`).
        share: of the bandwidth measured in the same run that those bytes reached.
        bandwidth: that, in bytes per second.
        gpu, driver, torch, triton, flashinfer, commit, utc: where and when it was measured.
    """

    op: str
    case: str
    kernel: str
    microseconds: float
    p20: float
    p80: float
    bytes: int
    share: float
    bandwidth: float
    gpu: str
    driver: str
    torch: str
    triton: str
    flashinfer: str
    commit: str
    utc: str


def row(op: str, case: str, kernel: str, timing: Timing, moved: int, bandwidth: float) -> ResultRow:
    """A row with the place and time of this measurement.

    Args:
        moved: bytes that must move.
    """
    return ResultRow(
        op, case, kernel, timing.median * 1e6, timing.p20 * 1e6, timing.p80 * 1e6, moved,
        roofline.share(moved, timing.median, bandwidth), bandwidth, **surroundings(),
    )  # fmt: skip


def surroundings() -> dict[str, str]:
    """The fields of a row that say where and when it was measured."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
        "commit": _commit(Path(__file__).parent),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    try:
        return str(nvrtc.version())
    except nvrtc.DriverError:
        return "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit(folder: Path) -> str:
    """The commit of the checkout, with a plus sign if files differ from it; `unknown` outside of a
    checkout."""
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


OURS = ("cuda", "triton")
"""Kernels of this package, as rows name them."""


def winners(rows: Iterable[ResultRow]) -> list[str]:
    """One line for each case that was also measured with a kernel of others: the fastest of both,
    and how many times as long the other one takes."""
    cases: dict[tuple[str, str], list[ResultRow]] = {}
    for one in rows:
        cases.setdefault((one.op, one.case), []).append(one)
    lines = []
    for (op, case), found in cases.items():
        ours = [one for one in found if one.kernel in OURS]
        others = [one for one in found if one.kernel not in OURS]
        if not ours or not others:
            continue
        fast, slow = sorted(
            (min(side, key=lambda one: one.microseconds) for side in (ours, others)),
            key=lambda one: one.microseconds,
        )
        lines.append(
            f"{op} {case}: {fast.kernel} wins with {fast.microseconds:.1f} us, {slow.kernel} takes"
            f" {slow.microseconds:.1f} us ({slow.microseconds / fast.microseconds:.2f}x)"
        )
    return lines


def write_rows(rows: Iterable[ResultRow], out: TextIO) -> list[ResultRow]:
    """Write a header, then one line per row as rows come; the rows."""
    writer = csv.DictWriter(out, [f.name for f in fields(ResultRow)], lineterminator="\n")
    writer.writeheader()
    out.flush()
    written = []
    for line in rows:
        written.append(line)
        content = asdict(line)
        writer.writerow(
            {**content, **{name: format(content[name], form) for name, form in FORMATS.items()}}
        )
        out.flush()
    return written
