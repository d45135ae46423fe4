"""Captures through SGLang for tests: as users run them, and in forks of a process that imported
SGLang.

A forked capture runs to its end, or up to the pass in which everything of it is killed. Its engine
is a fork too.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engines import text_tokens
from forked_python import ForkedPython
from sglang_forks import shared

from oscar_zoo.artifact.hadamard import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture import engine_session, state
from oscar_zoo.compute.capture.base import Progress
from oscar_zoo.compute.capture.engine import EngineFacts, capture_with_engine
from oscar_zoo.compute.capture.engine_session import EngineSession, open_engine
from oscar_zoo.compute.capture.held_out_rows import LayerRows
from oscar_zoo.compute.capture.in_engine import InEngine
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.moments import Moments
from oscar_zoo.engines.sglang import tapped_engine
from oscar_zoo.engines.sglang.capture_program import capture_program
from oscar_zoo.engines.sglang.launch.capture_flags import read_flags
from oscar_zoo.engines.sglang.launch.environment import child_environment
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.tasks.base import TaskPrompt
from oscar_zoo.evaluate.tasks.perplexity import Perplexity
from oscar_zoo.models.inspect import inspect_model

WINDOWS = Windows(sink=8, recent=16)
NEEDS = frozenset({"rows", "weighted", "outputs", "weights"})
LENGTHS = (140, 256, 7)  # 256 is the whole context of the random model
CPU = {"device": "cpu", "dtype": "float32", "mem_fraction_static": 0.5}


def prompts() -> tuple[tuple[int, ...], ...]:
    ids = text_tokens()
    return tuple(
        tuple(ids[start : start + n]) for start, n in zip((0, 3000, 9000), LENGTHS, strict=True)
    )


@dataclass(frozen=True)
class Captured:
    """What a capture gave, and every report of its progress."""

    moments: Moments
    facts: EngineFacts
    progress: list[tuple[int, int, str]]
    measured: Measured | None = None


@dataclass(frozen=True)
class Measured:
    """What was measured with a running model: perplexities without a cache and with INT2, and the
    held-out rows of its first full-attention layer."""

    perplexities: tuple[float, ...]
    rows: LayerRows

    @classmethod
    def of(cls, model: RunningModel) -> Measured:
        block = model.block
        transforms = hadamard_set(block, "k"), hadamard_set(block, "v")
        recipe = ServingRecipe(group_size=16, clip=Clip(k=0.96, v=0.92), windows=WINDOWS)
        ids = torch.tensor(prompts()[1])
        task = Perplexity((TaskPrompt(ids, torch.arange(24, len(ids) - 1)),))
        found = [
            model.measure(task, cache, tick=lambda: None).value
            for cache in (None, CacheSpec(*transforms, recipe), None)
        ]
        rows = model.held_out_rows([ids.tolist()], WINDOWS, tick=lambda *_: None)
        return cls(tuple(found), rows(block.attention_layers[0]))


@dataclass(frozen=True)
class Run:
    """One capture.

    Attributes:
        model: folder.
        work: its own folder, which must exist.
        tensor_parallel: number of ranks.
        site: folder with a `sitecustomize` for the engine's processes.
        measure: whether to measure with the same engine afterwards.
        flags: flags of a user for the engine.
    """

    model: str
    work: str
    tensor_parallel: int = 1
    site: str = ""
    measure: bool = False
    flags: tuple[str, ...] = ()

    @contextmanager
    def opened(self) -> Iterator[EngineSession]:
        """The engine, started from this process."""
        env = {
            **child_environment(os.environ, device="cpu", kernels=Path(self.work)),
            "OMP_NUM_THREADS": "1",
        }
        if self.site:
            env["PYTHONPATH"] = os.pathsep.join([self.site, env["PYTHONPATH"]])
        if self.tensor_parallel > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("01"[: self.tensor_parallel])
        with open_engine(
            capture_program(env, read_flags(self.flags)),
            self.model,
            max(LENGTHS),
            tensor_parallel=self.tensor_parallel,
            engine=CPU,
            work=Path(self.work),
        ) as session:
            yield session

    def here(self, *, resume: bool = False, progress: Progress | None = None) -> Captured:
        """Capture in this process."""
        told: list[tuple[int, int, str]] = []
        with self.opened() as session:
            moments, facts = capture_with_engine(
                session,
                prompts(),
                needs=NEEDS,
                geometry=inspect_model(self.model),
                progress=progress or (lambda *news: told.append(news)),
                resume=resume,
            )
            running = InEngine(session, inspect_model(self.model), None, torch.device("cpu"))
            measured = Measured.of(running) if self.measure else None
        return Captured(moments, facts, told, measured)

    def killed(self, number: int) -> None:
        """Capture up to a pass, then kill this process group; in the second pass that of the engine
        first."""
        state.MIN_SECONDS, state.SHARE = 0.0, 0
        engine = tapped_engine.TappedEngine
        engine._passes = partialmethod(_waiting, engine._passes, number)  # type: ignore[assignment]

        def told(done: int, total: int, where: str) -> None:
            if not where.startswith(f"pass {number} "):
                return
            if number == 2:
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    os.killpg(int(child), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)

        self.here(resume=True, progress=told)


def _waiting(engine: Any, passes: Callable[..., None], number: int, *arguments: Any) -> None:
    """In the engine's process, a fork: stand still once a pass was told of, or all is done before
    the kill comes."""
    *others, progress = arguments

    def told(done: int, total: int, where: str) -> None:
        progress(done, total, where)
        if where.startswith(f"pass {number} "):
            threading.Event().wait()

    passes(engine, *others, told)


def forked(run: Run, kills: tuple[int, ...] = ()) -> Captured:
    """`run` to its end, after ones that were killed in the passes `kills`; each goes on with what
    was left.

    In forks of the process that imported SGLang (`sglang_forks`).
    """
    work = Path(run.work)
    out, log = work.with_suffix(".pickle"), work.with_suffix(".log")

    def call(**given: Any) -> int:
        return shared().call("capture_runs:capture", work, log, run=asdict(run), **given)

    for number in kills:
        status = call(kill=number)
        assert status == -signal.SIGKILL, (
            f"{status} instead of the kill in pass {number}: {log.read_text()[-4000:]}"
        )
    assert call(resume=bool(kills), out=str(out)) == 0, log.read_text()[-4000:]
    captured: Captured = pickle.loads(out.read_bytes())
    return captured


def capture(run: dict[str, Any], out: str = "", kill: int = 0, resume: bool = False) -> None:
    """In the fork: `Run.killed`, or `Run.here` with the result pickled in the file `out`."""
    engine_session.subprocess = SimpleNamespace(Popen=ForkedPython, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    if kill:
        Run(**run).killed(kill)
    else:
        Path(out).write_bytes(pickle.dumps(Run(**run).here(resume=resume)))
