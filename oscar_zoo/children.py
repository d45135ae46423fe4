"""How this program starts another one. `make lint` refuses every other way.

A Python that is started with `-m` or `-c` looks for modules in the current folder first, which is
the user's, or somebody else's. No process of ours does, nor one that it starts itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

Child = subprocess.Popen  # noqa: TID251
SAFE = {"PYTHONSAFEPATH": "1"}
"""What every environment holds, for the Pythons that a child starts."""


def python(*arguments: str, isolated: bool = False) -> list[str]:
    """The command line of a Python that imports nothing from the current folder; `isolated` also
    ignores the user's packages and all variables of Python."""
    return [sys.executable, "-I" if isolated else "-P", *arguments]


def start(command: list[str], *, env: Mapping[str, str] | None = None, **given: Any) -> Child[Any]:
    """Start a program; `given` is for `subprocess.Popen`. A Python is started only as `python`
    writes it."""
    if command[0] == sys.executable and command[1:2] not in (["-I"], ["-P"]):
        raise ValueError(f"a Python without -P or -I: {command[:3]}")
    whole = {**(os.environ if env is None else env), **SAFE}
    return Child(command, env=whole, **given)


def output(command: list[str], *, env: Mapping[str, str], seconds: float) -> str:
    pipe = subprocess.PIPE
    with start(command, env=env, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            said, told = child.communicate(timeout=seconds)
        except BaseException:
            child.kill()
            raise
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command, said, told)
        return str(said)
