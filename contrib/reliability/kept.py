"""The rows of a whole run, kept one by one, so that a run that stops can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiment import Experiment, Found
from page import Row


def keep(file: Path, row: Row) -> None:
    """Add a row to a file of JSON lines."""
    found = row.found
    record = {
        "name": row.experiment.name,
        "found": found if isinstance(found, str) else [dict(found.figures), found.violations],
        "seconds": row.seconds,
        "commit": row.commit,
    }
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def kept(file: Path, experiments: Sequence[Experiment]) -> list[Row]:
    """The rows in the file, the last of each experiment; none where there is no file."""
    if not file.exists():
        return []
    by_name = {experiment.name: experiment for experiment in experiments}
    rows: dict[str, Row] = {}
    for line in file.read_text("utf-8").splitlines():
        record = json.loads(line)
        experiment, found = by_name.get(record["name"]), record["found"]
        if experiment is None:
            continue
        if not isinstance(found, str):
            found = Found(found[0], tuple(found[1]))
        rows[experiment.name] = Row(experiment, found, record["seconds"], record["commit"])
    return list(rows.values())
