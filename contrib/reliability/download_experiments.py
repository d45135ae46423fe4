"""S6: damaged downloads from both hubs, with both versions of the Hugging Face client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_faults import state
from experiment import Found, Scale
from hub_uses import HUB_2

PROGRAM = Path(__file__).with_name("corruption_run.py")
SAME_SIZE = 0.3
"""The least share of deliveries whose size is right."""


@dataclass(frozen=True)
class Source:
    """A hub and its client, with the damaged deliveries of the long and of the short form."""

    name: str
    scheme: str
    many: int
    few: int
    client: Path | None = None


SOURCES = (
    Source("Hugging Face", "hf", 400, 42),
    Source("Hugging Face, client 2", "hf", 300, 42, HUB_2),
    Source("ModelScope", "ms", 300, 42),
)


def damaged(scale: Scale) -> Found:
    """Deliver every kind of damage to every file, a thousand times; then deliver honestly."""
    sources = [one for one in SOURCES if one.client is None or one.client.is_dir()]
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda source: _run(scale, source), sources))
    violations = []
    for source, one in zip(sources, told, strict=True):
        wrong = [f"not refused as damaged: {accepted}" for accepted in one["accepted"]]
        wrong += [] if one["unchanged"] else ["the store is not what it was"]
        wrong += [] if one["healed"] else ["an honest delivery is not taken afterwards"]
        violations += [f"{source.name}: {line}" for line in wrong]
    refused, same = (sum(one[key] for one in told) for key in ("refused", "same_size"))
    if same < SAME_SIZE * refused:
        violations.append(f"only {same} of {refused} had the right size")
    kinds = {outcome.partition(":")[0] for one in told for outcome in one["outcomes"]}
    figures = {"refused": refused, "of the right size": same, "kinds of damage": len(kinds)}
    return Found(figures, tuple(violations))


def _run(scale: Scale, source: Source) -> dict[str, Any]:
    folder = scale.work / source.name
    folder.mkdir()
    count = source.many if scale.whole else source.few
    path = {} if source.client is None else {"PYTHONPATH": str(source.client)}
    own = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(count), "20261120", source.scheme],
        env={**os.environ, **state(folder), **path, **own},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
