"""Forks a command for every line on stdin; see `disk_faults.FaultyCommands`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import signal
import struct
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

PACKAGES = ("cli.commands", "cli.render", "registry", "site", "artifact")
"""Imported whole; none of them imports torch."""
LATE = ("mmap", "rich._emoji_codes", "rich._spinners", "rich.live", "rich.progress")
"""What commands would import late."""


def main(library: str, imports: list[str]) -> None:
    """Answer jobs until stdin ends."""
    faults = ctypes.CDLL(library)
    faults.disk_faults_counted.restype = ctypes.c_long
    faults.disk_faults_arm.argtypes = [ctypes.c_long, *[ctypes.c_int] * 4, ctypes.c_char_p]
    import_all(imports)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), faults)), flush=True)


def import_all(imports: Iterable[str] = ()) -> None:
    """Import what commands import, late or not, and `imports`."""
    for name in ("oscar_zoo.cli.main", *_modules(), *LATE, *imports):
        importlib.import_module(name)


def _modules() -> Iterator[str]:
    for name in PACKAGES:
        package = importlib.import_module(f"oscar_zoo.{name}")
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        yield from (module.name for module in found)


def _answer(job: dict[str, Any], faults: ctypes.CDLL) -> dict[str, int]:
    counted, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(counted)
        _run(job, faults, tell)
    os.close(tell)
    told = os.read(counted, 8)
    os.close(counted)
    _, status = os.waitpid(child, 0)
    calls = struct.unpack("q", told)[0] if len(told) == 8 else 0
    return {"code": os.waitstatus_to_exitcode(status), "calls": calls}


def _run(job: dict[str, Any], faults: ctypes.CDLL, tell: int) -> NoReturn:
    code = 70
    try:
        signal.alarm(600)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name in [name for name in os.environ if name.startswith("OSCAR_ZOO")]:
            del os.environ[name]
        os.environ.update(job["environment"])
        os.chdir(job["root"])
        from oscar_zoo.cli.main import run

        sys.argv = ["oscar-zoo", *job["arguments"]]
        faults.disk_faults_arm(
            job["at"], job["how"], job["error"], job["stays"], job["reads"], job["root"].encode()
        )
        code = run(job["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        calls = faults.disk_faults_counted()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(tell, struct.pack("q", calls))
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
