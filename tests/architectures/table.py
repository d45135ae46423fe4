"""`make models`: try every architecture on this CPU and write docs/models.md.

A row is recorded as soon as it is known, so an interrupted run goes on with `--missing`. `--only`
takes some architectures, and `--no-serve` keeps what is recorded about servers, which take half a
minute each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from architecture_attempts import Attempt, compute_and_evaluate, serve
from architecture_page import PAGE, Row, page, read_records, write_records
from architectures import ARCHITECTURES


def main(arguments: list[str] | None = None) -> int:
    """Try, record, write; 1 when something fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="what was never tried")
    parser.add_argument("--no-serve", action="store_true", help="start no servers")
    chosen = parser.parse_args(arguments)
    rows = read_records()
    names = chosen.only or [
        name for name in ARCHITECTURES if not chosen.missing or lacks(rows, name)
    ]
    for number, name in enumerate(names, 1):
        rows[name] = tried(name, rows.get(name), no_serve=chosen.no_serve)
        row = rows[name]
        print(
            f"{number}/{len(names)} {name}: compute {row.compute.outcome}, eval"
            f" {row.evaluate.outcome}, serve {row.serve.outcome} {row.serve.said}",
            flush=True,
        )
        write_records(rows)
        PAGE.write_text(page(rows), "utf-8")
    return int(any(one.outcome == "fails" for row in rows.values() for one in attempts(row)))


def lacks(rows: Mapping[str, Row], name: str) -> bool:
    """Whether something was never tried with an architecture."""
    return name not in rows or any(one.outcome == "not tried" for one in attempts(rows[name]))


def attempts(row: Row) -> tuple[Attempt, Attempt, Attempt]:
    """The three of a row."""
    return row.compute, row.evaluate, row.serve


def tried(name: str, before: Row | None, *, no_serve: bool) -> Row:
    """A new row; `before` gives what is not tried again."""
    with tempfile.TemporaryDirectory(prefix="oscar-models-") as folder:
        work = Path(folder) / "work"
        computed, evaluated = compute_and_evaluate(name, work)
        if computed.outcome != "works":
            served = computed
        elif no_serve:
            served = before.serve if before else Attempt("not tried")
        else:
            served = serve(name, work)
    releases = f"transformers {version('transformers')} and SGLang {version('sglang')}"
    return Row(computed, evaluated, served, releases)


if __name__ == "__main__":
    sys.exit(main())
