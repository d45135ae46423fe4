"""The command line in child processes, as people run it."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli_output import parsed
from hub_uses import HUB_2


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed on stdout with `--json`."""
        return parsed(self.out)


@dataclass(frozen=True)
class Cli:
    """`oscar-zoo` in the folder `folder`, with its own state below it.

    Attributes:
        environment: all variables of the children, for example `HubServer.environment(folder)`.
        folder: where commands run.
        version: major version of huggingface_hub that the children import.
    """

    environment: Mapping[str, str]
    folder: Path
    version: int = 1

    @property
    def variables(self) -> dict[str, str]:
        state = {
            f"OSCAR_ZOO_{name}": str(self.folder / name.lower())
            for name in ("CACHE", "DATA", "STATE", "CONFIG")
        }
        path = {"PYTHONPATH": str(HUB_2)} if self.version == 2 else {}
        return {**self.environment, **state, **path}

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "oscar_zoo", *arguments],
            env={**self.variables, **variables},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, timeout: float = 300, **variables: str) -> Finished:
        child = self.start(*arguments, **variables)
        try:
            out, err = child.communicate(timeout=timeout)
        except BaseException:
            child.kill()
            child.communicate()
            raise
        return Finished(child.returncode, out, err)
