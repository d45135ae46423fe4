"""The capture of a job, with transformers in this process or in an engine of its own.

It also keeps what an interrupted run needs to go on, and describes the result for the moments file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from oscar_zoo.artifact.fit_block import Coverage, Numerics
from oscar_zoo.artifact.model_block import ModelBlock
from oscar_zoo.compute import coverage
from oscar_zoo.compute.capture import engine as in_engine
from oscar_zoo.compute.capture import transformers as in_process
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.engine import EngineProgram
from oscar_zoo.compute.capture.engine_job import Scalar
from oscar_zoo.compute.capture.state import STATE
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord
from oscar_zoo.models.loading import LoadedModel


@dataclass(frozen=True)
class CaptureRequest:
    """What to capture.

    Attributes:
        data: the sequences.
        needs: kinds of sums that will be read.
        work: folder for what an interrupted capture needs to go on.
        resume: go on from what is in `work`.
        progress: called after every sequence of every step.
    """

    data: CalibrationData
    needs: frozenset[Need]
    work: Path
    resume: bool = False
    progress: Progress = no_progress


@dataclass(frozen=True)
class EngineRequest:
    """The engine that captures, and the model it loads.

    Attributes:
        program: the engine's program.
        model: local folder or Hugging Face id.
        revision: of a Hugging Face id.
        device: kind of device, with or without a number.
        dtype: of the forward passes.
        tensor_parallel: number of ranks.
    """

    program: EngineProgram
    model: str
    revision: str | None
    device: str
    dtype: str
    tensor_parallel: int


@dataclass(frozen=True)
class Captured:
    """The result of a capture.

    Attributes:
        moments: sums over all sequences.
        numerics: how the sums were made.
        coverage: the layers, heads and tokens that were observed.
    """

    moments: Moments
    numerics: Numerics
    coverage: Coverage

    def info(self, model: ModelBlock, data: CalibrationData) -> MomentsInfo:
        """The header of the moments file."""
        return MomentsInfo(
            model=model,
            calibration=data.facts(),
            coverage=self.coverage,
            numerics=self.numerics,
            sequences=tuple(map(SequenceRecord.of, data.sequences)),
        )


def is_main_process() -> bool:
    """Whether this process writes results; only the first process of `torchrun` does."""
    return int(os.environ.get("RANK", "0")) == 0


def can_resume(work: Path) -> bool:
    """Whether an interrupted run left a state in `work` that a capture can go on from."""
    return any(work.glob(f"*/{STATE}"))


@contextmanager
def kept_for_resume(work: Path) -> Iterator[None]:
    """Keep `work` when the body fails and a capture can be resumed from it; remove it otherwise."""
    missing = [folder for folder in work.absolute().parents if not folder.exists()]
    done = False
    try:
        yield
        done = True
    except KeyboardInterrupt as error:
        if can_resume(work):
            error.add_note(
                f"what was captured is kept in {work}; to go on from there, run the same command"
                " again (oscar-zoo compute needs --resume for it)"
            )
        raise
    finally:
        if done or not can_resume(work):
            in_process.discard(work)
            in_engine.discard(work)
            for folder in (work, *missing):
                # a folder stays when it holds other files, such as the artifact
                with suppress(OSError):
                    folder.rmdir()


def capture(loaded: LoadedModel, request: CaptureRequest) -> Captured:
    """Capture with transformers, on all processes that `torchrun` started.

    Raises:
        ComputeFailed: a head or layer was missed.
    """
    moments = in_process.capture(
        loaded,
        request.data,
        needs=request.needs,
        progress=request.progress,
        work=request.work,
        resume=request.resume,
    )
    moments = replace(moments, geometry=loaded.block.geometry)
    coverage.check(moments, request.needs)
    seen = coverage.observed(moments, dp=int(os.environ.get("WORLD_SIZE", "1")))
    return Captured(moments, in_process.numerics(loaded), seen)


def capture_in_engine(
    block: ModelBlock, request: CaptureRequest, engine: EngineRequest
) -> Captured:
    """Capture in an engine of its own; raises as `capture_with_engine`.

    Args:
        block: the model that the engine must turn out to hold.
        request: what to capture.
        engine: where.
    """
    given: dict[str, Scalar] = {"device": engine.device.partition(":")[0], "dtype": engine.dtype}
    if engine.revision is not None:
        given["revision"] = engine.revision
    moments, facts = in_engine.capture_with_engine(
        engine.model,
        request.data,
        program=engine.program,
        needs=request.needs,
        tensor_parallel=engine.tensor_parallel,
        geometry=block.geometry,
        engine=given,
        progress=request.progress,
        work=request.work,
        resume=request.resume,
    )
    seen = coverage.observed(moments, tp=facts.tensor_parallel)
    return Captured(moments, facts.numerics, seen)
