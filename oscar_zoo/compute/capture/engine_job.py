"""The program that holds an SGLang engine: one pass or two over all sequences, saving as it goes.

`capture/sglang.py` starts it with a file that holds a `Job`, and keeps its standard input open
without writing: the end of that tells it that its parent is gone. News go out as lines of JSON on
standard output.
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

from oscar_zoo.artifact.specs import Spec
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.base import Progress
from oscar_zoo.compute.capture.rank_store import Done, RankStore
from oscar_zoo.errors import OscarZooError

Scalar = str | int | float | bool | None
Call = Callable[..., None]


class CaptureJob(Spec):
    """What the program is told.

    Attributes:
        folder: private and gone afterwards; for its log and word of failures.
        store, facts, pace: of the `RankStore`.
        engine: arguments of `sglang.Engine`.
        sequences: token ids.
        outputs, weights: what the taps sum beside q, k and v.
        weighted: run a second pass.
    """

    folder: str
    store: str
    facts: dict[str, str]
    pace: tuple[float, float]
    engine: dict[str, Scalar]
    sequences: tuple[tuple[int, ...], ...]
    outputs: bool
    weights: bool
    weighted: bool

    @property
    def passes(self) -> int:
        """Over all sequences."""
        return 2 if self.weighted else 1

    def tokens_done(self, at: Done | None) -> int:
        """Tokens that are through, each pass counting its share of them."""
        if at is None:
            return 0
        lengths = list(map(len, self.sequences))
        return (sum(lengths) * (at.number - 1) + sum(lengths[: at.sequences])) // self.passes


def _main() -> None:
    job = CaptureJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    threading.Thread(target=_end_with_parent, args=(job.folder,), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what SGLang prints belongs in the log

        def tell(**news: Any) -> None:
            out.write(json.dumps(news) + "\n")
            out.flush()

        try:
            tell(sglang=_drive(job, lambda *state: tell(progress=state)))
        except OscarZooError as error:
            ranks.write_failure(Path(job.folder), "engine", error)
        except Exception as error:  # the engine's own error types are not public
            tell(error=" ".join(f"{type(error).__name__}: {error}".split())[:400].rstrip("."))


def _end_with_parent(folder: str) -> None:
    """End everything when nobody holds the other end of standard input any more, and remove what
    nobody else would."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _drive(job: CaptureJob, progress: Progress) -> str:
    """All passes through one engine; the version of sglang."""
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
    """Every pass from where `at` stands; ends with a save."""
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
    """Calls a method of the tap on all ranks; SGLang passes on the errors of the first one, the
    others leave files."""

    def call(step: str, **options: bool | str) -> None:
        engine.collective_rpc(f"oscar_tap_{step}", folder=job.folder, **options)
        ranks.raise_failure(Path(job.folder))

    return call


if __name__ == "__main__":
    _main()
