"""Commands as forks of the process that imported SGLang; the servers that they start are forks,
too.

That fresh processes import what they need cannot be tested so. These start them as users do:
`tests/test_demo.py` and `tests/cli/test_serve.py` by our command line,
`tests/engines/sglang/test_command_line.py` by SGLang's, and `test_engine_tokens.py` beside it for
the workers of the other releases. A command that a test watches or ends is a `forked_process`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cli_child import Cli, Finished
from forked_python import fork_programs
from sglang_forks import Forks, shared


class ForkedCli(Cli):
    """`Cli` for commands that start SGLang, in processes that import nothing."""

    def __call__(self, *arguments: str, timeout: float = 300, **variables: str) -> Finished:
        """Run a command to its end; only the patience of `sglang_forks` ends it."""
        command = ["-m", "oscar_zoo", *arguments]
        return forked(command, {**self.variables, **variables}, self.folder)


def forked(command: Sequence[object], environment: Mapping[str, str], folder: Path) -> Finished:
    return forked_by(shared(), command, environment, folder, folder)


def forked_by(
    forks: Forks,
    command: Sequence[object],
    environment: Mapping[str, str],
    folder: Path,
    results: Path,
) -> Finished:
    """Run it by these forks, and let what it prints go to files in `results`."""
    out, err = results / "forked.out", results / "forked.err"
    err.unlink(missing_ok=True)
    code = forks.call(
        "forked_commands:_run",
        folder,
        err,
        command=[*map(str, command)],
        environment=dict(environment),
        out=str(out),
    )
    return Finished(code, out.read_text(), err.read_text())


def _run(command: list[str], environment: dict[str, str], out: str, number: str = "") -> None:
    """In the fork: the command, with its output in the file `out` and its number in `number`."""
    fork_programs()
    with Path(out).open("wb") as stream:
        child = subprocess.Popen([sys.executable, *command], env=environment, stdout=stream)
        if number:
            written = Path(number).with_suffix(".tmp")
            written.write_text(str(child.pid))
            written.rename(number)
        sys.exit(child.wait())


def running_in(folder: Path) -> list[int]:
    """Processes whose current folder is `folder` or below it, as that of a command's servers is;
    the command lines of forks say nothing."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if place.readlink().is_relative_to(folder):
                found.append(int(place.parent.name))
    return found
