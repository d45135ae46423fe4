"""An inference engine in a process group of its own, which runs one job after the other.

This module knows no engine. It is given an `EngineProgram`, starts it, sends it the jobs of
`engine_job`, and reads its news. An engine may kill the process that holds it when it breaks, so
this process must be another one to report the reason. The program ends when this process ends,
whatever the cause.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo import children
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.owners import TEMP_PREFIX
from oscar_zoo.children import Child
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.engine_job import EndJob, EngineSetup, Job, Scalar
from oscar_zoo.errors import MissingDependency, OscarZooError

_LOG = "engine.log"


@dataclass(frozen=True)
class EngineProgram:
    """A program that holds an inference engine and runs the jobs of `engine_job`.

    Attributes:
        engine: name of the engine's distribution, recorded in manifests.
        command: starts the program; the path of the file with its `EngineSetup` is appended.
        environment: the whole environment of the program.
        arguments: `(model, tokens of the longest sequence, ranks, given)` to
            `EngineSetup.arguments`.
        failure: from the log of the program and the model to the error that says why it failed, and
            the next step.
    """

    engine: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    arguments: Callable[[str, int, int, Mapping[str, Scalar]], tuple[str, ...]]
    failure: Callable[[Path, str], OscarZooError]


@dataclass(frozen=True)
class EngineSession:
    """A running engine with a model.

    Attributes:
        program: what was started.
        model: local folder or Hugging Face id.
        arguments: as of `EngineSetup`.
        tensor_parallel: number of ranks.
        kept: folder for what is worth keeping after an interrupt.
        folder: private folder, removed afterwards.
    """

    program: EngineProgram
    model: str
    arguments: tuple[str, ...]
    tensor_parallel: int
    kept: Path
    folder: Path
    _child: Child[bytes]

    def run(self, job: Job, progress: Progress = no_progress) -> Any:
        """Run a job to its end; returns its result.

        Raises:
            UnsupportedModel, OutputExists, IntegrityError, StorageError, ComputeFailed,
                FlagRefused: as reported by a rank, by the engine, or in its log. The engine is gone
                then.
        """
        news: dict[str, Any] = {}
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its log says why
            self._child.stdin.write(job.model_dump_json().encode() + b"\n")
            self._child.stdin.flush()
        for line in self._child.stdout or ():
            news = json.loads(line)
            if "progress" not in news:
                break
            progress(*news["progress"])
        ranks.raise_failure(self.folder)
        if "done" in news:
            return news["done"]
        raise self.program.failure(self.folder / _LOG, self.model)

    def new_folder(self) -> Path:
        """An empty folder inside `folder`.

        Raises:
            StorageError: the disk refused.
        """
        with durable.storage_errors(f"cannot write to {self.folder}"):
            return Path(tempfile.mkdtemp(dir=self.folder))


@contextlib.contextmanager
def open_engine(
    program: EngineProgram,
    model: str,
    longest: int,
    *,
    tensor_parallel: int = 1,
    engine: Mapping[str, Scalar] | None = None,
    work: Path | None = None,
) -> Iterator[EngineSession]:
    """Start an engine; it ends with the block.

    Args:
        program: the engine.
        model: local folder or Hugging Face id.
        longest: tokens of the longest sequence of all jobs.
        tensor_parallel: number of ranks; may be above the number of KV heads.
        engine: what else is decided for the engine, such as `device`, `dtype`, `revision`.
        work: `EngineSession.kept`; `None` keeps nothing.

    Raises:
        MissingDependency: the engine is not installed.
        StorageError: the disk refused.
    """
    if importlib.util.find_spec(program.engine) is None:
        raise MissingDependency.for_extra(program.engine, "serve")
    local = Path(model).expanduser()
    where = (
        str(local.resolve()) if local.is_dir() else model
    )  # the child runs in a folder of its own
    arguments = program.arguments(where, longest, tensor_parallel, engine or {})
    with _folders(work) as (kept, folder):
        place, log = folder / "setup.json", folder / _LOG
        setup = EngineSetup(folder=str(folder), arguments=arguments)
        place.write_text(setup.model_dump_json(), encoding="utf-8")
        env = {**program.environment, ranks.VARIABLE: "1"}
        command = [*program.command, str(place)]
        with log.open("wb") as stream, _child(command, env, folder, stream.fileno()) as child:
            session = EngineSession(program, where, arguments, tensor_parallel, kept, folder, child)
            yield session
            with contextlib.suppress(OscarZooError):  # all that was wanted is here
                session.run(EndJob())


@contextlib.contextmanager
def _folders(work: Path | None) -> Iterator[tuple[Path, Path]]:
    """The folder that is kept, and a private folder that is removed when the block ends."""
    with contextlib.ExitStack() as stack:
        if work is None:
            base = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="oscar-zoo-capture-"))
            )
        else:
            base = work.absolute()
            with durable.storage_errors(f"cannot write to {base}"):
                durable.make_folders(base)
        # when both processes are killed the private folder stays, and `discard` removes it
        prefix = f"{TEMP_PREFIX}capture-"
        private = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=prefix, dir=base, ignore_cleanup_errors=True)
        )
        yield base, Path(private)


@contextlib.contextmanager
def _child(
    command: list[str], env: Mapping[str, str], folder: Path, log: int
) -> Iterator[Child[bytes]]:
    """The started program; its whole process group is killed when the block ends."""
    pipe = subprocess.PIPE
    # the end of standard input tells the child that this process is gone
    child = children.start(
        command,
        env=env,
        cwd=folder,
        stdin=pipe,
        stdout=pipe,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for end in (child.stdin, child.stdout):
            if end is not None:
                with contextlib.suppress(BrokenPipeError):  # a job that nobody has read
                    end.close()
