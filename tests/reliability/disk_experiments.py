"""S7 and S8: commands that are killed, or whose disk fails, at every one of their system calls."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from disk_faults import Ended, Fault, FaultyCommands, state
from disk_scenarios import SCENARIOS, Scenario
from experiment import Found, Scale

KILLS = (Fault("kill"), Fault("torn"))
ERRORS = (
    Fault("fail", error=errno.ENOSPC),
    Fault("fail", error=errno.ENOSPC, stays=True),
    Fault("fail", error=errno.EDQUOT),
    Fault("fail", error=errno.EIO, reads=True),
    Fault("fail", error=errno.EIO, stays=True),
    Fault("fail", error=errno.EMFILE, reads=True),
    Fault("fail", error=errno.EINTR, reads=True),
    Fault("short"),
)
"""Those of `reads` also disturb calls that change nothing."""
FEW = {KILLS: 3, ERRORS: 1}
"""Calls of each command and kind in the short form."""
TIMES = frozenset(("fetched", "published", "since", "created", "time"))
"""Keys of JSON that differ from run to run."""
ENDS = (0, 1, 4, 5, 6, 7)
"""Exit codes of a command whose disk fails."""


class Disturbed:
    """One scenario, with what it looks like undisturbed."""

    def __init__(self, scenario: Scenario, commands: FaultyCommands, work: Path) -> None:
        self.scenario, self.commands = scenario, commands
        self.before, self.root = work / "before", work / "root"
        self.before.mkdir(parents=True)
        scenario.begin(self.before)
        self.calls = {reads: self._count(reads) for reads in (False, True)}
        self.wanted = self._outputs()

    def _count(self, reads: bool) -> int:
        ended = self.disturb(Fault(reads=reads))
        if ended.code != 0:
            raise RuntimeError(f"{self.scenario.name} fails undisturbed: {ended.err}")
        self.repair()
        return ended.calls

    def disturb(self, fault: Fault) -> Ended:
        """Run the command with `fault` in a fresh copy of the folder."""
        if self.root.exists():
            shutil.rmtree(self.root)
        subprocess.run(["cp", "-a", self.before, self.root], check=True)
        return self.commands(self.root, *self.scenario.command, fault=fault)

    def repair(self) -> Ended:
        """Run the command again, without a fault."""
        return self.commands(self.root, *self.scenario.command)

    def leftovers(self) -> int:
        """Temporary files and folders that are there."""
        return sum(1 for _ in self.root.rglob(".tmp*"))

    def _outputs(self) -> list[Any]:
        outputs = []
        for arguments in self.scenario.compared:
            ended = self.commands(self.root, *arguments)
            outputs.append((ended.code, _timeless(json.loads(ended.out or "null"))))
        return outputs

    def wrong(self, ended: Ended) -> Iterator[str]:
        """What does not hold after the disturbed command `ended`, in words."""
        for error in ("Traceback", "internal error"):
            if error in ended.err:
                yield f"{error} on stderr: {ended.err.strip().splitlines()[-1]}"
        for arguments in self.scenario.kept:
            other = state(self.root / "other")
            kept = self.commands(self.root, *arguments, environment=other)
            if kept.code != 0:
                yield f"{' '.join(arguments)} ended with {kept.code}: {kept.err.strip()}"
            shutil.rmtree(self.root / "other", ignore_errors=True)
        again = self.repair()
        if again.code != 0:
            yield f"the second run ended with {again.code}: {again.err.strip()}"
        else:
            for arguments, got, want in zip(
                self.scenario.compared, self._outputs(), self.wanted, strict=True
            ):
                if got != want:
                    yield f"{' '.join(arguments)} printed {got} in place of {want}"


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [_timeless(one) for one in value]
    return value


def killed_anywhere(scale: Scale) -> Found:
    """Kill every command before every call that changes the disk, and in the middle of writes."""
    return _sweep(scale, KILLS)


def failing_disk(scale: Scale) -> Found:
    """Fail every call once, and from then on, with each error; write the half of every write."""
    return _sweep(scale, ERRORS)


def _sweep(scale: Scale, kinds: tuple[Fault, ...]) -> Found:
    points: Counter[str] = Counter()
    violations: list[str] = []
    leftovers = 0
    with FaultyCommands(scale.work / "faults") as commands:
        for scenario in SCENARIOS:
            disturbed = Disturbed(scenario, commands, scale.work / scenario.name.replace(" ", ""))
            for kind in kinds:
                calls = disturbed.calls[kind.reads]
                for at in scale.sample(range(1, calls + 1), FEW[kinds]):
                    ended = disturbed.disturb(replace(kind, at=at))
                    points[scenario.name] += 1
                    wrong = list(disturbed.wrong(ended))
                    if kind.how == "fail" and ended.code not in ENDS:
                        wrong.append(f"ended with {ended.code}: {ended.err.strip()}")
                    leftovers += disturbed.leftovers()
                    label = f"{scenario.name}, {_words(kind)} {at} of {calls}"
                    violations += [f"{label}: {line}" for line in wrong]
    figures = {f"points of {name}": count for name, count in points.items()}
    figures["temporary files left after the second run"] = leftovers
    return Found(figures, tuple(violations))


def _words(fault: Fault) -> str:
    if fault.how != "fail":
        return {"kill": "killed at", "torn": "torn at", "short": "half written at"}[fault.how]
    name = errno.errorcode[fault.error]
    return f"{name} from" if fault.stays else f"{name} at"
