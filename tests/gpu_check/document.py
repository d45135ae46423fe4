"""`docs/gpu-check.md`: one section per kind of GPU, each replaced by the newest run on that kind.
Pure."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HEAD = """# GPU check

This page shows the last run of the documented commands on each kind of GPU, with small models.
Look here for what works on yours. `make gpu-check` in a checkout tries it and writes its section;
run it, too, after changes to `compute`, `evaluate`, `runtime`, `engines` or `kernels`. What
*passed* is within the limits of `tests/gpu_check/steps.py`. A model with a perplexity of thousands
is a random one, which recalls nothing with any cache. Speed: [figures.md](figures.md).
"""


Status = Literal["passed", "FAILED", "not tried", "not ended"]


@dataclass(frozen=True)
class StepResult:
    """One step of the check.

    Attributes:
        name: what it does, in a few words.
        status: `passed` where every figure is within its limit, and `not tried` where this machine
            cannot run the step.
        seconds: how long it took.
        figures: what was measured, in words; when it failed, what went wrong; else why not.
    """

    name: str
    status: Status
    seconds: float
    figures: str


def table(results: Sequence[StepResult]) -> str:
    """A Markdown table, a line per step."""
    lines = ["| step | result | seconds | figures |", "|---|---|---:|---|"]
    for one in results:
        figures = " ".join(one.figures.split()).replace("|", "\\|")
        status = "**FAILED**" if one.status == "FAILED" else one.status
        lines.append(f"| {one.name} | {status} | {one.seconds:.0f} | {figures} |")
    return "\n".join(lines)


def verdict(results: Sequence[StepResult]) -> str:
    """What the run says as a whole; `passed` counts what was tried where something was not."""
    count = Counter(one.status for one in results)
    if count["FAILED"]:
        return "FAILED"
    if count["not ended"]:
        return "not completed"
    if count["not tried"]:
        return f"{count['passed']} passed, {count['not tried']} not tried"
    return "passed"


def section(
    facts: Mapping[str, str],
    results: Sequence[StepResult],
    *,
    date: str,
    commit: str,
    seconds: float,
    kept: int = 0,
) -> str:
    """One run.

    Args:
        facts: the machine, by name; `GPU` gives the heading.
        date: day of the run, ISO 8601.
        commit: of the checkout.
        seconds: from start to end; steps may overlap.
        kept: how many of the results an earlier run had found.
    """
    more = f" after a run in which {kept} steps had passed" if kept else ""
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "GPU")
    versions = textwrap.fill(f"{known}.", 100, break_on_hyphens=False)
    return (
        f"## {facts['GPU']}\n\n**{verdict(results)}** on {date}, commit {commit},"
        f" {seconds:.0f} seconds in all{more}.\n{versions}\n\n{table(results)}\n"
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
