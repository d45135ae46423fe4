"""S8 on a real full disk: commands on small file systems in memory, of many sizes.

As a program, in a mount namespace of its own: `full_disk.py WORK SIZES`; prints one line of JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests/support")]

from disk_experiments import ENDS, Disturbed  # noqa: E402
from disk_faults import FaultyCommands  # noqa: E402
from disk_faults import lacking as no_faults  # noqa: E402
from disk_scenarios import SCENARIOS  # noqa: E402
from experiment import Found, Scale  # noqa: E402

NAMESPACE = ("unshare", "--map-root-user", "--mount")
COMMANDS = ("pull", "pull --output", "pull --accept-new-digest", "publish", "mirror")
"""Those that write more than one small file."""
SIZES, FEW_SIZES = 64, 1
ROOMY = 64 << 10
"""KiB in which everything fits."""


class Small(Disturbed):
    """A scenario on a file system of a chosen size."""

    def mounted(self, kib: int) -> None:
        """Put a fresh file system of `kib` KiB with the beginning of the scenario at `root`."""
        self.unmount()
        self.root.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", self.root]
        subprocess.run(mount, check=True)
        subprocess.run(["cp", "-a", f"{self.before}/.", self.root], check=True)

    def roomy(self) -> None:
        """Make room."""
        enlarge = ["mount", "-o", f"remount,size={ROOMY}k", self.root]
        subprocess.run(enlarge, check=True)

    def unmount(self) -> None:
        """Take it away, if it is there."""
        subprocess.run(["umount", "-l", self.root], check=False, capture_output=True)

    def used(self) -> int:
        """KiB in use."""
        usage = shutil.disk_usage(self.root)
        return usage.used >> 10

    def at_size(self, kib: int, wanted: list[Any]) -> tuple[int, list[str]]:
        """Exit code of the command on a file system of `kib`, and what did not hold."""
        self.mounted(kib)
        ended = self.commands(self.root, *self.scenario.command)
        self.roomy()
        wrong = list(self.wrong(ended, wanted))
        if ended.code not in ENDS:
            wrong.append(f"ended with {ended.code}: {ended.err.strip()}")
        return ended.code, [f"{self.scenario.name}, {kib} KiB: {line}" for line in wrong]


def filled(scale: Scale) -> Found:
    """Every command on disks from just too small for anything to large enough."""
    sizes = SIZES if scale.whole else FEW_SIZES
    program = [*NAMESPACE, sys.executable, __file__, str(scale.work), str(sizes)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])
    return Found(told["figures"], tuple(told["violations"]))


def lacking() -> str | None:
    """Why there is no small file system here, or `None`."""
    if no_faults():
        return no_faults()
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return "there is no unshare"
    return None if done.returncode == 0 else "a file system cannot be mounted in a namespace"


def _run(work: Path, sizes: int) -> dict[str, Any]:
    runs, full, violations = 0, 0, []
    with FaultyCommands(work / "faults") as commands:
        for scenario in (one for one in SCENARIOS if one.name in COMMANDS):
            small = Small(scenario, commands, work / scenario.name)
            wanted = small.wanted
            for kib in _sizes(small, sizes):
                code, wrong = small.at_size(kib, wanted)
                runs, full = runs + 1, full + (code != 0)
                violations += wrong
            small.unmount()
    figures = {"commands": len(COMMANDS), "runs": runs, "runs that did not fit": full}
    return {"figures": figures, "violations": violations}


def _sizes(small: Small, count: int) -> Iterator[int]:
    """Sizes in KiB from what is there at the beginning to a little more than what is needed."""
    small.mounted(ROOMY)
    before = small.used()
    small.repair()
    needed = (small.used() - before) * 3 // 2 + 8
    for number in range(count):
        yield before + needed * (2 * number + 1) // (2 * count)


if __name__ == "__main__":
    print(json.dumps(_run(Path(sys.argv[1]), int(sys.argv[2]))))
