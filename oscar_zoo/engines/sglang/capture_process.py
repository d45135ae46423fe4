"""The program that captures moments in an SGLang engine: `python -m ... JOB.json`.

`compute/capture/engine.py` starts it with a `CaptureJob` in a file, and keeps its standard input
open without writing to it. When that input ends, the parent is gone and the program ends too. News
go to standard output, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.base import Progress
from oscar_zoo.compute.capture.engine_job import CaptureJob
from oscar_zoo.compute.capture.rank_store import Done, RankStore
from oscar_zoo.errors import OscarZooError

Call = Callable[..., None]


def _main() -> None:
    job = CaptureJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    threading.Thread(target=_end_with_parent, args=(job.folder,), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what SGLang prints belongs in the log

        def tell(**news: Any) -> None:
            out.write(json.dumps(news) + "\n")
            out.flush()

        try:
            tell(version=_drive(job, lambda *state: tell(progress=state)))
        except OscarZooError as error:
            ranks.write_failure(Path(job.folder), "engine", error)
        except Exception as error:  # the engine's own error types are not public
            tell(error=" ".join(f"{type(error).__name__}: {error}".split())[:400].rstrip("."))


def _end_with_parent(folder: str) -> None:
    """End this process group when the parent is gone: then standard input reaches its end.

    The private folder is removed too, because the parent can no longer do it.
    """
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _drive(job: CaptureJob, progress: Progress) -> str:
    """Run all passes through one engine; returns the version of sglang."""
    import sglang

    store = RankStore(Path(job.store), job.facts, job.pace)
    at = store.load()
    engine = sglang.Engine(**job.engine)
    try:
        call = _caller(engine, job)
        call("start", outputs=job.outputs, weights=job.weights)
        if at is not None:
            call("load", place=str(at.folder))
        _passes(job, engine, call, store, at or Done(1, 0, Path()), progress)
    finally:
        engine.shutdown()
    return str(sglang.__version__)


def _passes(
    job: CaptureJob, engine: Any, call: Call, store: RankStore, at: Done, progress: Progress
) -> None:
    """Run every pass that is left after `at`, and save at the end."""
    total = sum(map(len, job.sequences))

    def save(place: Path) -> None:
        call("save", place=str(place))

    for number in range(at.number, job.passes + 1):
        if number == 2:
            call("weigh")
        first = at.sequences if number == at.number else 0
        for count, sequence in enumerate(job.sequences[first:], first + 1):
            engine.generate(
                input_ids=[list(sequence)],
                sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            )
            call("check")
            if store.due() or (number, count) == (job.passes, len(job.sequences)):
                store.save(number, count, save)
            done = job.tokens_done(Done(number, count, Path()))
            progress(done, total, f"pass {number} of {job.passes}")


def _caller(engine: Any, job: CaptureJob) -> Call:
    """A function that calls a step of the tap on all ranks.

    SGLang passes on only the error of the first rank; the other ranks report theirs in files.
    """

    def call(step: str, **options: bool | str) -> None:
        engine.collective_rpc(f"oscar_tap_{step}", folder=job.folder, **options)
        ranks.raise_failure(Path(job.folder))

    return call


if __name__ == "__main__":
    _main()
