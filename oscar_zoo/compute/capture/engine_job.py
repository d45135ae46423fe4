"""The message that tells a program with an inference engine what to capture.

`capture/engine.py` writes it to a file and starts the program with that file as its argument. The
program answers with one JSON object per line on its standard output: `progress` (the arguments of
`Progress`), and at the end `version` (of the engine) or `error` (one line).
"""

from __future__ import annotations

from oscar_zoo.artifact.specs import Spec
from oscar_zoo.compute.capture.rank_store import Done

Scalar = str | int | float | bool | None


class CaptureJob(Spec):
    """What the program is asked to do.

    Attributes:
        folder: private folder for the log and for reports of failures; removed afterwards.
        store, facts, pace: arguments of the `RankStore`.
        engine: arguments of the engine's constructor.
        sequences: token ids.
        outputs, weights: whether the taps also sum attention outputs and output projections.
        weighted: whether to run a second pass for the weighted value sums.
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
        """Number of passes over all sequences."""
        return 2 if self.weighted else 1

    def tokens_done(self, at: Done | None) -> int:
        """Tokens that are done; each pass counts for an equal share of every token."""
        if at is None:
            return 0
        lengths = list(map(len, self.sequences))
        return (sum(lengths) * (at.number - 1) + sum(lengths[: at.sequences])) // self.passes
