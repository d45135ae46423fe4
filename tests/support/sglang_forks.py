"""One process that imports SGLang and forks for every call, so that a test pays for the import
once.

Importing SGLang takes ten seconds of CPU time, a fork nothing. A call runs in a process, process
group and folder of its own, with variables of its own, and nothing of it is seen by the next one.
Hooks are installed by SGLang's plugin loader, so each call that wants them loads them anew. What a
variable changes while SGLang is imported cannot be tested here, nor what a fresh worker process
needs: for that start one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import triton_interpreter

PRELOADED = (
    "sglang",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "oscar_zoo.engines.sglang.hooks.installation",
)
"""Importing them has no effect on SGLang."""
SECONDS = 600
"""A call takes five to twenty seconds on two idle cores, and minutes on busy ones."""


class Forks:
    """The process. Calls run one after the other; threads may wait for their turn.

    Args:
        environment: whole environment; calls add to it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        here = str(Path(__file__).parent)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._server = subprocess.Popen(
            [sys.executable, "-c", "import sglang_forks; sglang_forks.serve()"],
            env={**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], here])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd="/",
            text=True,
            start_new_session=True,
        )
        self._turn = threading.Lock()
        self._running = 0

    def call(
        self,
        function: str,
        folder: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        **given: Any,
    ) -> int:
        """Call `MODULE:NAME` of this folder with JSON-able arguments; the exit status, 1 after an
        exception that is none.

        Args:
            folder: where it runs.
            log: gets what it prints, and the traceback of an exception.
            env: variables beside those of the process.
        """
        order = {
            "function": function,
            "folder": str(folder),
            "log": str(log),
            "env": dict(env or {}),
            "given": given,
        }
        assert self._server.stdin is not None
        with self._turn:
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            self._running = self._reply()
            patience = threading.Timer(SECONDS, self.kill)
            patience.start()
            try:
                return self._reply()
            finally:
                self._running = 0
                patience.cancel()

    def kill(self) -> None:
        """End the call that runs now, with everything in its process group."""
        if pid := self._running:
            for kill in (os.kill, os.killpg):  # it may not have its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _reply(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"SGLang cannot be imported:\n{self._log.read().decode()[-4000:]}")
        return int(line)

    def close(self) -> None:
        """End the process."""
        self.kill()
        self._server.kill()
        self._server.communicate()
        self._log.close()


@functools.cache
def shared(front: Path | None = None) -> Forks:
    """The one of this process, with the installed SGLang or the one in the folder `front`; it ends
    with this process."""
    from engines import environment

    env = environment()
    if front is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(front), env["PYTHONPATH"]])
    forks = Forks(env)
    atexit.register(forks.close)
    return forks


def serve() -> None:
    """Import SGLang, then run the calls on standard input."""
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    for module in PRELOADED:
        importlib.import_module(module)
    triton_interpreter.patch_once()
    triton_interpreter.without_overflow_checks()
    _find_bindings_once()
    gc.collect()
    gc.freeze()  # or every collection of a call would walk all that was imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(**json.loads(line)))
        replies.write(f"{child}\n")
        replies.flush()
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        replies.flush()


def _find_bindings_once() -> None:
    """From now on, in this process and its forks, SGLang does not walk through all modules for each
    of its hooks, to find where else a function is bound: that took a second of every call.

    Bindings of today are found in a table. Modules that are imported later are walked through.
    """
    from sglang.srt.plugins import hook_registry

    known = {*sys.modules}
    table: dict[int, list[tuple[ModuleType, str]]] = {}
    for module, name, value in _bindings(known):
        table.setdefault(id(value), []).append((module, name))

    def propagate(original: object, wrapped: object, source: object) -> int:
        later = _bindings(sys.modules.keys() - known)
        places = table.get(id(original), []) + [(module, name) for module, name, _ in later]
        stale = [(m, n) for m, n in places if m is not source and vars(m).get(n) is original]
        for module, name in stale:
            setattr(module, name, wrapped)
        return len(stale)

    assert hasattr(hook_registry, "_propagate_patch")
    hook_registry._propagate_patch = propagate


def _bindings(modules: Iterable[str]) -> list[tuple[ModuleType, str, object]]:
    found = [sys.modules[name] for name in modules]
    return [
        (module, name, value)
        for module in found
        if isinstance(module, ModuleType)
        for name, value in [*vars(module).items()]
    ]


def _run(function: str, folder: str, log: str, env: dict[str, str], given: dict[str, Any]) -> int:
    end_with_parent()
    os.setsid()
    os.chdir(folder)
    with Path(log).open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(env)
    module, name = function.split(":")
    try:
        getattr(importlib.import_module(module), name)(**given)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends; SGLang's workers do
    the same."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
