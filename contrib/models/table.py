"""`make models`: try every architecture and write docs/models.md.

On a CPU this fills the columns compute, eval and serve, one architecture after the other. With
`--gpu` it fills the column of servers on GPUs on a machine with CUDA, several side by side.

A row is recorded as soon as it is known, so an interrupted run goes on with `--missing`. `--only`
takes some architectures. `--no-serve` keeps what is recorded about servers on a CPU, which take
half a minute each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from architecture_attempts import CPU, GPU, compute_and_evaluate, refused_by_server, serve, stop
from architecture_page import (
    CPU_COLUMNS,
    PAGE,
    Row,
    all_attempts,
    page,
    read_records,
    write_records,
)
from architectures import ARCHITECTURES

ONE = Path(__file__).with_name("served_one.py")


def main(arguments: list[str] | None = None) -> int:
    """Try, record, write; 1 when something fails."""
    chosen = _parser().parse_args(arguments)
    rows = read_records()
    columns = ("gpu",) if chosen.gpu else CPU_COLUMNS
    names = chosen.only or [
        name for name in ARCHITECTURES if not chosen.missing or lacks(rows, name, columns)
    ]
    tried = on_gpu(names, rows, chosen) if chosen.gpu else on_cpu(names, rows, chosen)
    failed = 0
    for number, (name, row) in enumerate(tried, 1):
        rows[name] = row
        cells = [(column, getattr(row, column)) for column in columns]
        told = ", ".join(f"{column} {one.outcome} {one.said}".strip() for column, one in cells)
        print(f"{number}/{len(names)} {name}: {told}", flush=True)
        failed += any(one.outcome == "fails" for _, one in cells)
        if chosen.device == "cuda" or not chosen.gpu:
            write_records(rows)
            PAGE.write_text(page(rows), "utf-8")
    return int(failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="what was never tried")
    parser.add_argument("--no-serve", action="store_true", help="start no servers")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--gpu", action="store_true", help="fill the column of servers on GPUs")
    gpu.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, writes nothing"
    )
    gpu.add_argument("--engine-flags", default="", help="more flags for SGLang, as one string")
    gpu.add_argument("--jobs", type=int, default=4, help="architectures side by side")
    gpu.add_argument("--limit", type=int, default=240, help="seconds for one architecture")
    gpu.add_argument("--logs", type=Path, help="folder for the logs of what fails")
    return parser


def lacks(rows: Mapping[str, Row], name: str, columns: Sequence[str]) -> bool:
    """Whether one of the columns was never tried with an architecture."""
    return name not in rows or any(
        getattr(rows[name], column).outcome == "not tried" for column in columns
    )


def on_cpu(
    names: Sequence[str], rows: Mapping[str, Row], chosen: argparse.Namespace
) -> Iterator[tuple[str, Row]]:
    """Rows with new columns of the CPU, in this process."""
    releases = f"transformers {version('transformers')} and SGLang {version('sglang')}"
    for name in names:
        before = rows.get(name, Row())
        with tempfile.TemporaryDirectory(prefix="oscar-models-") as folder:
            work = Path(folder) / "work"
            computed, evaluated = compute_and_evaluate(name, work)
            if computed.outcome != "works":
                served = refused_by_server(work) or computed
            else:
                served = before.serve if chosen.no_serve else serve(name, work)
        yield (
            name,
            replace(before, compute=computed, evaluate=evaluated, serve=served, releases=releases),
        )


def on_gpu(
    names: Sequence[str], rows: Mapping[str, Row], chosen: argparse.Namespace
) -> Iterator[tuple[str, Row]]:
    """Rows with a new column of the GPU; those that were never tried on a CPU keep its columns
    empty."""
    place = GPU if chosen.device == "cuda" else CPU
    releases = f"SGLang {_release('sglang')} on {_device_name(chosen.device)}"
    start = str(int(0.8 * chosen.limit))

    def command(name: str, folder: Path) -> list[str]:
        one = [sys.executable, str(ONE), name, str(folder), chosen.device]
        return [*one, chosen.engine_flags, start]

    with tempfile.TemporaryDirectory(prefix="oscar-models-") as folder:
        found = all_attempts(
            names,
            command,
            Path(folder),
            jobs=chosen.jobs,
            limit=chosen.limit,
            logs=chosen.logs,
            ended=lambda own: stop(own / "work", place),
        )
        for name, attempt in found:
            yield name, replace(rows.get(name, Row()), gpu=attempt, gpu_releases=releases)


def _release(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of this machine"


def _device_name(device: str) -> str:
    from oscar_zoo.models import hardware

    gpus = hardware.gpus() if device == "cuda" else []
    return f"an {gpus[0].name}" if gpus else "this machine"


if __name__ == "__main__":
    sys.exit(main())
