"""docs/reliability.md: promise, experiment, figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiment import Experiment, Found

HEAD = """\
# Reliability

`make reliability` puts the promises of [security.md](security.md) to the test and writes this
page. It takes two hours on two quiet cores. `make test` runs a sample of most rows, and of the
others only the tests that the last column names, which cover parts of the promise. S-numbers name
the promises in the code of the experiments, `contrib/reliability/`. A run that stopped, or in which
a promise did not hold, goes on later (`RELIABILITY_FLAGS=--resume`), so each row names its commit.
"""
WIDTH = 100
"""Characters of a line."""
SHOWN = 20
"""Violations that are listed of one experiment."""


@dataclass(frozen=True)
class Row:
    """An experiment that ran at a commit; `found` is a sentence where it could not."""

    experiment: Experiment
    found: Found | str
    seconds: float
    commit: str

    @property
    def held(self) -> Literal["yes", "no", "not run"]:
        """Whether the promise held."""
        if isinstance(self.found, str):
            return "not run"
        return "no" if self.found.violations else "yes"


def page(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The text of the page; `facts` say when and where."""
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    table = "| promise | held | minutes | commit | in `make test` |\n|---|---|---:|---|---|"
    table += "".join(
        f"\n| [{row.experiment.number} {row.experiment.name}](#{_anchor(row)}) |"
        f" {row.held} | {row.seconds / 60:.1f} | {row.commit} |"
        f" {row.experiment.instead or 'sample'} |"
        for row in rows
    )
    parts = [HEAD, f"Last run: {about}.\n", table]
    return "\n".join(parts) + "\n" + "".join(_section(row) for row in rows)


def _anchor(row: Row) -> str:
    return f"{row.experiment.number} {row.experiment.name}".lower().replace(" ", "-")


def _section(row: Row) -> str:
    title = f"\n## {row.experiment.number} {row.experiment.name}\n"
    lines = [title, textwrap.fill(row.experiment.promise, WIDTH), ""]
    if isinstance(row.found, str):
        return "\n".join([*lines, f"Not run: {row.found}.", ""])
    items = [f"{name}: {_number(value)}" for name, value in row.found.figures.items()]
    items += [f"**did not hold:** {line[:300]}" for line in row.found.violations[:SHOWN]]
    lines += [textwrap.fill(f"- {one}", WIDTH, subsequent_indent="  ") for one in items]
    more = len(row.found.violations) - SHOWN
    return "\n".join([*lines, *([f"- and {more} more"] if more > 0 else []), ""])


def _number(value: float | str) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
