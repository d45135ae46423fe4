"""Commands as forks of the process that imported SGLang; the servers that they start are forks,
too.

That fresh processes import what they need cannot be tested so. These start them as users do:
`tests/test_demo.py` and `tests/cli/test_serve.py` by our command line,
`tests/engines/sglang/test_command_line.py` by SGLang's, and `test_engine_tokens.py` beside it for
the workers of the other releases. A command that a test watches or ends is a `forked_process`.
"""

import contextlib
import functools
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cli_child import Cli, Finished
from engines import INSTALLED
from forked_python import fork_programs
from sglang_forks import Forks, connect_to, shared

from oscar_zoo import children
from oscar_zoo.engines.sglang.launch.server import READS

OUTPUT = children.output


class ForkedCli(Cli):
    """`Cli` for commands that start SGLang, in processes that import nothing, where they have the
    first version of huggingface_hub."""

    def __call__(self, *arguments: str, timeout: float = 300, **variables: str) -> Finished:
        """Run a command to its end; only the patience of `sglang_forks` ends it."""
        if self.version != 1:
            return super().__call__(*arguments, timeout=timeout, **variables)
        command, env = ["-m", "oscar_zoo", *arguments], {**self.variables, **variables}
        with tempfile.TemporaryDirectory() as results:
            return forked(command, env, self.folder, self.forks(), Path(results))

    def forks(self) -> Forks:
        return shared()


class QuickCli(ForkedCli):
    """The same of a process that has imported what most commands import, which is two thirds of
    their time. They import clients of hubs themselves, as a fresh process does. What a command
    imports, and what another version of a client changes, is for a fresh process."""

    def forks(self) -> Forks:
        return _commands()


@functools.cache
def _commands() -> Forks:
    return connect_to("commands")


def forked(
    command: Sequence[object],
    environment: Mapping[str, str],
    folder: Path,
    forks: Forks | None = None,
    results: Path | None = None,
) -> Finished:
    """Run it by these forks, and let what it prints go to files in `results`, or in `folder`."""
    out, err = ((results or folder) / name for name in ("forked.out", "forked.err"))
    err.unlink(missing_ok=True)
    given = {"command": [*map(str, command)], "environment": dict(environment), "out": str(out)}
    code = (forks or shared()).call("forked_commands:_run", folder, err, **given)
    return Finished(code, out.read_text(), err.read_text())


def output(command: list[str], *, env: Mapping[str, str], seconds: float) -> str:
    """`children.output`, but SGLang's parser is asked by a fork."""
    if READS not in command or not INSTALLED:
        return OUTPUT(command, env=env, seconds=seconds)
    with tempfile.TemporaryDirectory() as results:
        done = forked(command[1:], env, Path.cwd(), results=Path(results))
    subprocess.CompletedProcess(command, done.code, stderr=done.err).check_returncode()
    return done.out


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
