"""What a capture is asked for and gives.

What an interrupted run needs to go on is kept here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.manifest import Coverage, ModelBlock, Numerics
from oscar_zoo.artifact.names import path_text
from oscar_zoo.compute.capture import transformers as in_process
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.state import DATA, STATE, another, facts_in
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord


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


def can_resume(work: Path) -> bool:
    """Whether an interrupted run left a state in `work` that a capture can go on from."""
    return any(work.glob(f"*/{STATE}"))


def check_text(work: Path, data: CalibrationData) -> None:
    """Refuse a state in `work` of another text than `data`, before the model is loaded. Everything
    else is compared when the capture goes on; a state that cannot be read is left to that.
    """
    for path in sorted(work.glob(f"*/{STATE}")):
        theirs = facts_in(path).get(DATA)
        mine = data.prompts_sha256
        if theirs not in (None, mine):
            raise another(path.parent, DATA, str(theirs), mine)


@contextmanager
def kept_for_resume(work: Path) -> Iterator[None]:
    """Keep `work` when the body fails and a capture can be resumed from it; remove it otherwise."""
    missing = [folder for folder in work.absolute().parents if not folder.exists()]
    done = False
    try:
        yield
        done = True
    except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C and SIGTERM
        if can_resume(work):
            error.add_note(f"what was captured is kept in {path_text(work)}")
        raise
    finally:
        if done or not can_resume(work):
            in_process.discard(work)
            for folder in (work, *missing):
                # a folder stays when it holds other files, such as the artifact
                with suppress(OSError):
                    folder.rmdir()
