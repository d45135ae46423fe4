"""S7 and S8: commands that are killed, or whose disk fails, at every one of their system calls."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from disk_faults import Ended, Fault, FaultyCommands, state
from disk_scenarios import SCENARIOS, Scenario, Words
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
CORES = 2
SHORT_KINDS = 2
"""Kinds that each command meets in the short form, others from command to command."""
TIMES = frozenset(("fetched", "published", "since", "created", "time"))
"""Keys of JSON that differ from run to run."""
ENDS = (0, 1, 4, 5, 6, 7, 8)
"""Exit codes of a command whose disk fails."""


class Disturbed:
    """One scenario, with what it looks like undisturbed."""

    def __init__(self, scenario: Scenario, commands: FaultyCommands, work: Path) -> None:
        self.scenario, self.commands = scenario, commands
        self.before, self.root = work / "before", work / "root"
        self.root.mkdir(parents=True)
        scenario.begin(self.root, self._do)
        self.root.rename(self.before)

    def _do(self, *arguments: str) -> None:
        ended = self.commands(self.root, *arguments)
        if ended.code != 0:
            raise RuntimeError(f"{' '.join(arguments)} fails undisturbed: {ended.err}")

    @functools.cache  # noqa: B019 (it lives as long as the sweep)
    def calls(self, reads: bool) -> int:
        """Calls of the undisturbed command, those that change nothing among them on demand."""
        ended = self.disturb(Fault(reads=reads))
        if ended.code != 0:
            raise RuntimeError(f"{self.scenario.name} fails undisturbed: {ended.err}")
        if not ended.calls:
            raise RuntimeError("no system call was counted: the library is not loaded")
        return ended.calls

    @functools.cached_property
    def wanted(self) -> list[Any]:
        """What the compared commands print when nothing was disturbed."""
        self.disturb(Fault())
        self.repair()
        return self._outputs()

    def disturb(self, fault: Fault) -> Ended:
        """Run the command with `fault` in a fresh copy of the folder."""
        if self.root.exists():
            shutil.rmtree(self.root)
        subprocess.run(["cp", "-a", self.before, self.root], check=True)
        return self.commands(self.root, *self.scenario.command, fault=fault)

    def repair(self) -> Ended:
        """Run the command again, without a fault."""
        return self.commands(self.root, *self.scenario.command)

    def leftovers(self) -> list[str]:
        """Temporary files and folders that are there."""
        return [str(path.relative_to(self.root)) for path in self.root.rglob(".tmp*")]

    def an_hour_later(self) -> None:
        """Let everything temporary be old enough to be swept."""
        then = time.time() - 2 * 3600
        for path in self.root.rglob(".tmp*"):
            os.utime(path, (then, then), follow_symlinks=False)

    def _outputs(self) -> list[Any]:
        outputs = []
        for arguments in self.scenario.compared:
            ended = self.commands(self.root, *arguments)
            outputs.append((ended.code, _timeless(json.loads(ended.out or "null"))))
        return outputs

    def wrong(self, ended: Ended, wanted: list[Any]) -> Iterator[str]:
        """What does not hold after the disturbed command `ended`, in words.

        Args:
            wanted: what the compared commands print undisturbed.
        """
        for error in ("Traceback", "internal error"):
            if error in ended.err:
                yield f"{error} on stderr: {ended.err.strip().splitlines()[-1]}"
        yield from self._gone(self.scenario.kept, state(self.root / "other"))
        shutil.rmtree(self.root / "other", ignore_errors=True)
        yield from self._gone(self.scenario.still, {})
        self.an_hour_later()
        again = self.repair()
        if again.code not in self.scenario.again:
            yield f"the second run ended with {again.code}: {again.err.strip()}"
            return
        for arguments, got, want in zip(
            self.scenario.compared, self._outputs(), wanted, strict=True
        ):
            if got != want:
                yield f"{' '.join(arguments)} printed {got} in place of {want}"

    def _gone(self, commands: Sequence[Words], environment: dict[str, str]) -> Iterator[str]:
        for arguments in commands:
            kept = self.commands(self.root, *arguments, environment=environment)
            if kept.code != 0:
                yield f"{' '.join(arguments)} ended with {kept.code}: {kept.err.strip()}"


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


@dataclass
class Tally:
    """What a sweep counted."""

    points: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def _sweep(scale: Scale, kinds: tuple[Fault, ...]) -> Found:
    tally = Tally()
    turn = itertools.cycle(kinds)
    lists: dict[Words, list[tuple[Scenario, list[Fault]]]] = {}
    for scenario in SCENARIOS:
        if scenario.imports and not scale.whole:
            continue  # torch alone takes seconds
        chosen = list(kinds) if scale.whole else [next(turn) for _ in range(SHORT_KINDS)]
        lists.setdefault(scenario.imports, []).append((scenario, chosen))
    tasks = [
        partial(_sweep_some, scale, scenarios[start::cores], tally, imports)
        for imports, scenarios in lists.items()
        for cores in (1 if imports or not scale.whole else CORES,)
        for start in range(cores)
    ]
    with ThreadPoolExecutor(CORES) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
    figures: dict[str, int | float | str] = {"points": tally.points.total()}
    figures |= {f"points of {name}": count for name, count in sorted(tally.points.items())}
    figures["exit codes"] = ", ".join(f"{code}: {n}" for code, n in sorted(tally.ends.items()))
    return Found(figures, tuple(tally.violations))


def _sweep_some(
    scale: Scale, scenarios: list[tuple[Scenario, list[Fault]]], tally: Tally, imports: Words
) -> None:
    """Disturb one scenario after the other, with a process of their own."""
    # LD_PRELOAD takes no path with a space
    work = scale.work / f"sweep{[one.name for one in SCENARIOS].index(scenarios[0][0].name)}"
    with FaultyCommands(work / "faults", imports) as commands:
        for scenario, kinds in scenarios:
            disturbed = Disturbed(scenario, commands, work / scenario.name)
            for kind in kinds:
                for at in _places(scale, scenario, disturbed.calls(kind.reads)):
                    code, wrong = _disturb_once(disturbed, replace(kind, at=at))
                    tally.points[scenario.name] += 1
                    tally.ends[code] += 1
                    tally.violations += wrong
            shutil.rmtree(work / scenario.name)


def _places(scale: Scale, scenario: Scenario, calls: int) -> list[int]:
    numbers = range(1, calls + 1)
    if scale.whole and scenario.sampled is not None:
        return replace(scale, whole=False).sample(numbers, scenario.sampled)
    return scale.sample(numbers, 1)


def _disturb_once(disturbed: Disturbed, fault: Fault) -> tuple[int, list[str]]:
    """Exit code of the disturbed command, and what did not hold after it."""
    wanted = disturbed.wanted
    ended = disturbed.disturb(fault)
    wrong = list(disturbed.wrong(ended, wanted))
    if fault.how == "fail" and ended.code not in ENDS:
        wrong.append(f"ended with {ended.code}: {ended.err.strip()}")
    calls = disturbed.calls(fault.reads)
    label = f"{disturbed.scenario.name}, {_words(fault)} {fault.at} of {calls}"
    left = disturbed.leftovers()
    if left:
        wrong.append(f"left over after a second run, an hour later: {left}")
    return ended.code, [f"{label}: {line}" for line in wrong]


def _words(fault: Fault) -> str:
    if fault.how != "fail":
        return {"kill": "killed at", "torn": "torn at", "short": "half written at"}[fault.how]
    name = errno.errorcode[fault.error]
    return f"{name} from" if fault.stays else f"{name} at"
