"""Programs of this interpreter that are forked from this process instead of started: what it has
imported they need not import."""

import importlib
import inspect
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from oscar_zoo import children

POPEN = subprocess.Popen
SIGNATURE = inspect.signature(POPEN._execute_child)  # type: ignore[attr-defined]


class ForkedPython(POPEN[Any]):
    """`subprocess.Popen`, but `python -m MODULE` and `python -c CODE` are forks of this process.

    Group, standard streams, folder, variables, search path and exit status are those of a program
    that was started, and it has no other open file. Other processes see our command line and our
    variables, where they look at it. SGLang's workers are forks of it, too, if it is imported here.
    Every other command is started, and so is Python with another option than `-P`.
    """

    def _execute_child(self, *given: Any) -> None:
        asked = SimpleNamespace(**SIGNATURE.bind(self, *given).arguments)
        program = _program(asked.args)
        if program is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        begun, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(asked, *program)
        self._child_created = True
        os.close(ready)
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(getattr(asked, end) for end in ends))  # type: ignore[attr-defined]
        os.read(begun, 1)  # its end closes once the fork has its group and its streams
        os.close(begun)


def fork_programs() -> None:
    """From now on, what this process and its forks start is a `ForkedPython`."""
    subprocess.Popen = ForkedPython  # type: ignore[misc]
    children.Child = ForkedPython  # type: ignore[misc]


def _program(command: Any) -> tuple[str, str, list[str]] | None:
    """`-m` or `-c`, the module or the code, and the arguments; `None` for what is not forked."""
    if not isinstance(command, Sequence) or isinstance(command, str):
        return None
    python, *words = map(os.fspath, command)
    if words[:1] == ["-P"]:
        del words[0]
    if python != sys.executable or len(words) < 2 or words[0] not in ("-m", "-c"):
        return None
    return words[0], words[1], words[2:]


def _become(asked: SimpleNamespace, how: str, what: str, arguments: list[str]) -> NoReturn:
    """In the fork: be a new process as far as others can tell, then run the program."""
    code = 1
    try:
        if asked.start_new_session:
            os.setsid()
        for number, end in enumerate((asked.p2cread, asked.c2pwrite, asked.errwrite)):
            if end != -1:
                os.dup2(end, number)
        if asked.cwd is not None:
            os.chdir(asked.cwd)
        _default_signals()
        if asked.preexec_fn is not None:
            asked.preexec_fn()
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(n, "w", 1, closefd=False) for n in (1, 2))  # noqa: SIM115
        if asked.env is not None:
            os.environ.clear()
            os.environ.update(asked.env)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        _follow_path(os.environ)
        _fork_workers()
        sys.argv = [what if how == "-m" else how, *arguments]
        code = _status(how, what)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _default_signals() -> None:
    """Handlers do not survive the start of a program."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _follow_path(environment: Mapping[str, str]) -> None:
    """What lies on PYTHONPATH hides what was imported from elsewhere by the same name."""
    path = [Path(place) for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:0] = map(str, path)
    places: dict[str, Path] = {}
    for folder in filter(Path.is_dir, path):
        for found in folder.iterdir():
            places.setdefault(found.stem, folder)
    for name, folder in places.items():
        here = getattr(sys.modules.get(name), "__file__", None)
        if here is not None and not Path(here).is_relative_to(folder):
            del sys.modules[name]
            if name == "sitecustomize":
                importlib.import_module(name)


def _fork_workers() -> None:
    if {"sglang", "sglang.srt.managers.scheduler"} <= sys.modules.keys():
        import engine_child

        engine_child.fork_workers()


def _status(how: str, what: str) -> int:
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0
