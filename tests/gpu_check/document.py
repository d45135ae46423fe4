"""`docs/gpu-check.md`: one section per kind of GPU, each replaced by the newest run on that kind.
Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEAD = """# GPU check

`make gpu-check` walks the documented paths on a machine with an NVIDIA GPU and writes this file.
Each section below is the last run on that kind of GPU. Whoever changes `compute`, `evaluate`,
`runtime`, `engines` or `kernels` runs it before saying that the change is done
([CONTRIBUTING.md](../CONTRIBUTING.md)).
"""


@dataclass(frozen=True)
class StepResult:
    """One step of the check.

    Attributes:
        name: what it does, in a few words.
        passed: whether every figure is within its limit; `None` for a step that has not ended.
        seconds: how long it took.
        figures: what was measured, in words; when it failed, what went wrong.
    """

    name: str
    passed: bool | None
    seconds: float
    figures: str


_RESULT = {True: "passed", False: "**FAILED**", None: "not ended"}


def table(results: Sequence[StepResult]) -> str:
    """A Markdown table, a line per step."""
    lines = ["| step | result | seconds | figures |", "|---|---|---:|---|"]
    for one in results:
        figures = " ".join(one.figures.split()).replace("|", "\\|")
        lines.append(f"| {one.name} | {_RESULT[one.passed]} | {one.seconds:.0f} | {figures} |")
    return "\n".join(lines)


def section(
    facts: Mapping[str, str],
    results: Sequence[StepResult],
    *,
    date: str,
    commit: str,
    seconds: float,
) -> str:
    """One run.

    Args:
        facts: the machine, by name; `GPU` gives the heading.
        date: day of the run, ISO 8601.
        commit: of the checkout.
        seconds: from start to end; steps may overlap.
    """
    found = {one.passed for one in results}
    verdict = "FAILED" if False in found else "not completed" if None in found else "passed"
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "GPU")
    versions = textwrap.fill(f"{known}.", 100, break_on_hyphens=False)
    return (
        f"## {facts['GPU']}\n\n**{verdict}** on {date}, commit {commit}, {seconds:.0f} seconds in"
        f" all.\n{versions}\n\n{table(results)}\n"
    )


def merge(old: str, new: str) -> str:
    """The document `old` with the section `new` in place of the one with the same heading, or
    behind the others."""
    heading = new.splitlines()[0]
    kept = [part for part in re.split(r"(?m)^(?=## )", old) if part.startswith("## ")]
    sections = [new if part.splitlines()[0] == heading else part.strip() + "\n" for part in kept]
    if heading not in [part.splitlines()[0] for part in kept]:
        sections.append(new)
    return "\n".join([HEAD, *sections])
