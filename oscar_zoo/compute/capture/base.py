"""What every capture engine does: token sequences in, moments of all attention layers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from oscar_zoo.compute.moments import Moments

Progress = Callable[[int, int, str], None]
"""`(tokens done, tokens in all, phase)`; called after every sequence."""


def no_progress(done: int, total: int, phase: str) -> None:
    """Say nothing."""


class Capture(Protocol):
    """Runs a model over calibration sequences and sums what its attention layers see."""

    def capture(
        self, sequences: Sequence[Sequence[int]], *, weighted: bool, progress: Progress = no_progress
    ) -> Moments:
        """Moments of `sequences`, without padding and without a KV cache, one sequence at a time and in order.

        Args:
            sequences: token ids.
            weighted: also run the second pass, which the `sst` sums need.
            progress: told after every sequence of every pass.

        Returns:
            Sums for every attention layer; coverage is checked by the caller.

        Raises:
            ComputeFailed: the model gave rows that do not fit its geometry.
        """
        ...
