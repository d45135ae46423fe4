"""Captures through SGLang for tests: as users run them, and forked from one process that imported SGLang.

`serve` imports SGLang once and then reads orders, a line of JSON each. Every order runs in a process of its own: a
`Run` to its end, or up to the pass in which everything of it is killed. The engine of such a run is a fork too, with
the group, standard input and variables that `subprocess.Popen` would have given it, and forks its workers.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import engine_child
from engines import environment, text_tokens

from oscar_zoo.compute.capture import sglang, sglang_process, state
from oscar_zoo.compute.capture.base import Progress
from oscar_zoo.compute.capture.sglang import SglangFacts, capture_with_sglang
from oscar_zoo.compute.moments import Moments
from oscar_zoo.evaluate.models import inspect_model
from oscar_zoo.sglang_plugin.launch import child_environment

NEEDS = frozenset({"rows", "weighted", "outputs", "weights"})
LENGTHS = (140, 256, 7)  # 256 is the whole context of the random model
CPU = {"device": "cpu", "dtype": "float32", "mem_fraction_static": 0.5}
SECONDS = 600
"""For one order: it takes ten seconds on two idle cores, and minutes on busy ones."""


def prompts() -> tuple[tuple[int, ...], ...]:
    ids = text_tokens()
    return tuple(tuple(ids[start : start + n]) for start, n in zip((0, 3000, 9000), LENGTHS, strict=True))


@dataclass(frozen=True)
class Captured:
    """What a capture gave, and every report of its progress."""

    moments: Moments
    facts: SglangFacts
    progress: list[tuple[int, int, str]]


@dataclass(frozen=True)
class Run:
    """One capture.

    Attributes:
        model: folder.
        work: its own folder, which must exist.
        tensor_parallel: number of ranks.
        site: folder with a `sitecustomize` for the engine's processes.
    """

    model: str
    work: str
    tensor_parallel: int = 1
    site: str = ""

    def here(self, *, resume: bool = False, progress: Progress | None = None) -> Captured:
        """Capture in this process."""
        told: list[tuple[int, int, str]] = []
        env = {**child_environment(os.environ, device="cpu", kernels=Path(self.work)), "OMP_NUM_THREADS": "1"}
        if self.site:
            env["PYTHONPATH"] = os.pathsep.join([self.site, env["PYTHONPATH"]])
        if self.tensor_parallel > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("01"[: self.tensor_parallel])
        moments, facts = capture_with_sglang(
            self.model,
            SimpleNamespace(sequences=prompts()),
            needs=NEEDS,
            environment=env,
            tensor_parallel=self.tensor_parallel,
            geometry=inspect_model(self.model),
            engine=CPU,
            progress=progress or (lambda *news: told.append(news)),
            work=Path(self.work),
            resume=resume,
        )
        return Captured(moments, facts, told)

    def killed(self, number: int) -> None:
        """Capture up to a pass, then kill this process group; in the second pass that of the engine first."""
        state.MIN_SECONDS, state.SHARE = 0.0, 0

        def told(done: int, total: int, where: str) -> None:
            if not where.startswith(f"pass {number} "):
                return
            if number == 2:
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    os.killpg(int(child), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)

        self.here(resume=True, progress=told)


class Forks:
    """The process that imported SGLang; orders run one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._log = (folder / "forks.log").open("wb")
        path = os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parent)])
        self._server = subprocess.Popen(
            [sys.executable, "-c", "import capture_runs; capture_runs.serve()"],
            env=environment(PYTHONPATH=path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            text=True,
            start_new_session=True,
        )

    def capture(self, run: Run, kills: tuple[int, ...] = ()) -> Captured:
        """`run` to its end, after ones that were killed in the passes `kills`; each goes on with what was left."""
        for number in kills:
            assert self._order(run, kill=number)[0] == -signal.SIGKILL
        code, out = self._order(run, resume=bool(kills))
        assert code == 0, (self._folder / "forks.log").read_text()[-4000:]
        captured: Captured = pickle.loads(out.read_bytes())
        return captured

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()
        self._log.close()

    def _order(self, run: Run, **options: Any) -> tuple[int, Path]:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._count += 1
        out = self._folder / f"{self._count}.pickle"
        self._server.stdin.write(json.dumps({"run": asdict(run), "out": str(out), **options}) + "\n")
        self._server.stdin.flush()
        patience = threading.Timer(SECONDS, os.killpg, (self._server.pid, signal.SIGKILL))
        patience.start()
        try:
            return int(self._server.stdout.readline()), out
        finally:
            patience.cancel()


class ForkedEngine:
    """What `capture_with_sglang` needs of `subprocess.Popen`, for the program that holds an engine."""

    def __init__(
        self, command: list[str], *, env: Mapping[str, str], cwd: Path, stderr: int, start_new_session: bool, **_: int
    ) -> None:
        assert command[1:4] == ["-P", "-m", sglang_process.__name__] and start_new_session
        theirs, ours = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(theirs[1])  # or the end of its parent would not be the end of its standard input
            os.close(ours[0])
            for end, number in ((theirs[0], 0), (ours[1], 1), (stderr, 2)):
                os.dup2(end, number)
            _engine(command[3:], env, cwd)
        os.close(theirs[0])
        os.close(ours[1])
        self.stdin: BinaryIO = os.fdopen(theirs[1], "wb")
        self.stdout: BinaryIO = os.fdopen(ours[0], "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _engine(argv: list[str], env: Mapping[str, str], cwd: Path) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    try:
        runpy.run_path(str(Path(env["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py")))
        engine_child.fork_workers()
        sglang_process._main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve() -> None:
    """Import SGLang once, then run the orders on standard input, each in a forked process."""
    engine_child.end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    for module in engine_child.PRELOADED:
        importlib.import_module(module)
    sglang.subprocess = SimpleNamespace(Popen=ForkedEngine, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(**json.loads(line)))
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        replies.flush()


def _run(run: dict[str, Any], out: str, kill: int = 0, resume: bool = False) -> int:
    engine_child.end_with_parent()
    os.setsid()
    try:
        if kill:
            Run(**run).killed(kill)
        else:
            Path(out).write_bytes(pickle.dumps(Run(**run).here(resume=resume)))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
