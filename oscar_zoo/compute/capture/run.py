"""The capture of a job: one of two engines, what is kept of an interrupted run, and what the
moments file says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from oscar_zoo.artifact.manifest import Coverage, ModelBlock, Numerics
from oscar_zoo.compute.capture import engine as in_engine
from oscar_zoo.compute.capture import transformers as in_process
from oscar_zoo.compute.capture.base import Progress
from oscar_zoo.compute.capture.state import STATE
from oscar_zoo.compute.coverage import observed
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.moments import Moments, Need
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord
from oscar_zoo.compute.options import ComputeOptions
from oscar_zoo.models.loading import LoadedModel


@dataclass(frozen=True)
class Captured:
    """What a capture gave.

    Attributes:
        moments: of all sequences, whole.
        numerics: how they were made.
        coverage: what was observed.
    """

    moments: Moments
    numerics: Numerics
    coverage: Coverage

    def info(self, model: ModelBlock, data: CalibrationData) -> MomentsInfo:
        """What the moments file says about them."""
        return MomentsInfo(
            model=model,
            calibration=data.facts(),
            coverage=self.coverage,
            numerics=self.numerics,
            sequences=tuple(map(SequenceRecord.of, data.sequences)),
        )


def is_main_process() -> bool:
    """Whether this process writes results; of those that `torchrun` starts, the first."""
    return int(os.environ.get("RANK", "0")) == 0


def can_resume(work: Path) -> bool:
    """Whether an interrupted run left something in `work` to go on from."""
    return any(work.glob(f"*/{STATE}"))


@contextmanager
def kept_for_resume(work: Path) -> Iterator[None]:
    """What a capture saved in `work` stays while the body fails, if there is anything to go on
    from."""
    missing = [folder for folder in work.absolute().parents if not folder.exists()]
    done = False
    try:
        yield
        done = True
    except KeyboardInterrupt as error:
        if can_resume(work):
            error.add_note(
                f"what was captured is kept in {work}; the same command goes on from there"
                " (compute: with --resume)"
            )
        raise
    finally:
        if done or not can_resume(work):
            in_process.discard(work)
            in_engine.discard(work)
            for folder in (work, *missing):
                with suppress(
                    OSError
                ):  # absent, or files are in it: the artifact, or somebody else's
                    folder.rmdir()


def capture(
    loaded: LoadedModel,
    data: CalibrationData,
    needs: frozenset[Need],
    *,
    work: Path,
    resume: bool,
    progress: Progress,
) -> Captured:
    """Capture with transformers, on all processes that `torchrun` started.

    Args:
        work: folder for what an interrupted run needs to go on.
        resume: go on from there.

    Raises:
        ComputeFailed: a head or layer was missed.
    """
    moments = in_process.capture(
        loaded, data, needs=needs, progress=progress, work=work, resume=resume
    )
    moments = replace(moments, geometry=loaded.block.geometry)
    moments.check_coverage(needs)
    coverage = observed(moments, dp=int(os.environ.get("WORLD_SIZE", "1")))
    return Captured(moments, in_process.numerics(loaded), coverage)


def capture_in_sglang(
    options: ComputeOptions,
    block: ModelBlock,
    data: CalibrationData,
    needs: frozenset[Need],
    *,
    work: Path,
    progress: Progress,
) -> Captured:
    """Capture with an SGLang engine of its own, tensor parallel as `options` say.

    Args:
        work: folder for what an interrupted run needs to go on, which `options.resume` does.
    """
    engine: dict[str, str | int | float | bool] = {
        "device": options.device.partition(":")[0],
        "dtype": options.dtype,
    }
    if options.revision is not None:
        engine["revision"] = options.revision
    run = partial(
        in_engine.capture_with_sglang,
        options.model,
        data,
        needs=needs,
        environment=options.environment,
    )
    moments, facts = run(
        tensor_parallel=options.tensor_parallel,
        geometry=block.geometry,
        engine=engine,
        progress=progress,
        work=work,
        resume=options.resume,
    )
    return Captured(moments, facts.numerics, observed(moments, tp=facts.tensor_parallel))
