"""One process that imports SGLang and forks for every call, so that a whole run of the tests pays
for the import once.

Importing SGLang takes ten seconds of CPU time, a fork nothing. A call runs in a process, process
group and folder of its own, with variables of its own, and nothing of it is seen by the next one.
Hooks are installed by SGLang's plugin loader, so each call that wants them loads them anew. What a
variable changes while SGLang is imported cannot be tested here, nor what a fresh worker process
needs: for that start one.

The process (`sglang_fork_server`) listens on a socket of Linux's abstract namespace. Every process
of a run of the tests has a connection of its own, the first one starts it, and it ends with the
last one.
"""

import atexit
import contextlib
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
"""The same in all processes of a run of the tests, and in no other run."""
SECONDS = 600
"""A call takes five to twenty seconds on two idle cores, and minutes on busy ones."""


class Forks:
    """A connection to the process. Calls run one after the other; threads may wait for their turn.

    Args:
        connection: its first line is why SGLang could not be imported, or nothing.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rw")
        connection.close()  # the stream keeps it open
        self._turn = threading.Lock()
        self.running = 0
        failure = self._reply()
        assert not failure, f"what is forked cannot be imported:\n{failure[-4000:]}"

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
        """
        order = {
            "function": function,
            "folder": str(folder),
            "log": str(log),
            "env": dict(env or {}),
            "given": given,
        }
        with self._turn:
            self._stream.write(json.dumps(order) + "\n")
            self._stream.flush()
            self.running = self._reply()
            patience = threading.Timer(SECONDS, self.kill)
            patience.start()
            try:
                return int(self._reply())
            finally:
                self.running = 0
                patience.cancel()

    def kill(self) -> None:
        if pid := self.running:
            for kill in (os.kill, os.killpg):  # it may not have its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._stream.close()

    def _reply(self) -> Any:
        line = self._stream.readline()
        if not line:
            raise EOFError("the process that imported SGLang is gone")
        return json.loads(line)


@functools.cache
def shared(front: Path | None = None) -> Forks:
    """The connection of this process, to the installed SGLang or to that in the folder `front`."""
    return connect(front)


def connect(front: Path | None = None) -> Forks:
    """Another connection, for a call that runs beside others."""
    from engines import environment

    env, name = environment(), front.name if front else "installed"
    if front is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(front), env["PYTHONPATH"]])
    # Releases compile other sources under the same name, and would build in one folder at once.
    env["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch-extensions" / name)
    return connect_to("sglang", env, name)


@functools.cache
def vllm() -> Forks:
    """The connection of this process to vLLM on a CPU; see `vllm_child`."""
    root = Path(__file__).resolve().parents[2]
    places = Path(sys.prefix) / "vllm", root, root / "kernels", root / "tests/engines/vllm"
    return connect_to("vllm", {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))})


def connect_to(what: str, env: Mapping[str, str] | None = None, name: str = "installed") -> Forks:
    """A connection to the process that imported `what`, with the whole environment `env`, or
    ours."""
    env = os.environ if env is None else env
    forks = _connect(f"\0oscar-zoo {RUN} {what} {name}", env, what)
    atexit.register(forks.close)
    return forks


def _connect(address: str, env: Mapping[str, str], what: str) -> Forks:
    while True:
        _start_once(address, env, what)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return Forks(connection)
        except (ConnectionRefusedError, ConnectionResetError, EOFError):
            connection.close()  # it does not listen yet, or has just ended
            time.sleep(0.05)


def _start_once(address: str, env: Mapping[str, str], what: str) -> None:
    """Start the process unless it is there, with the whole environment `env`; only one can listen
    at an address."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listener.listen()
        number = listener.fileno()
        call = f"serve(socket.socket(fileno={number}), {what!r})"
        code = f"import socket, sglang_fork_server; sglang_fork_server.{call}"
        here = Path(__file__).parent
        modules = [here, here.parents[1] / "contrib/reliability"]
        path = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), *map(str, modules)]))
        quiet = subprocess.DEVNULL
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**env, "PYTHONPATH": path},
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            cwd="/",
            pass_fds=[number],
            start_new_session=True,
        )
