"""Every experiment of `make reliability`, one row each, in the order of the page.

To add one, write a function that takes a `Scale` and returns a `Found`, and add its row. The short
form of every row runs in `make test`, so it takes a few seconds at most.
"""

from __future__ import annotations

import disk_experiments
import disk_faults
from experiment import Experiment

EXPERIMENTS = (
    Experiment(
        "S7",
        "kill",
        "After a kill at any moment every version is absent or whole, and the same command run"
        " again repairs the rest.",
        disk_experiments.killed_anywhere,
        disk_faults.lacking,
    ),
    Experiment(
        "S8",
        "disk-errors",
        "Errors of the disk end a command with an exit code and one line, and nothing is lost.",
        disk_experiments.failing_disk,
        disk_faults.lacking,
    ),
)
