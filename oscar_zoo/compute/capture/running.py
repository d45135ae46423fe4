"""A model that runs: what is captured from it and measured with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute import coverage
from oscar_zoo.compute.capture import transformers as with_transformers
from oscar_zoo.compute.capture.calibration_rows import CalibrationRows, collect_rows
from oscar_zoo.compute.capture.held_out_rows import HeldOutRows, collect
from oscar_zoo.compute.capture.run import Captured, CaptureRequest
from oscar_zoo.evaluate.measure import Measurement, Task, measure
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel

Ticks = Callable[[int, int], None]
"""Called with `(sequences done, sequences in all)`."""


@dataclass(frozen=True)
class RunningModel:
    """A model in this process, with transformers."""

    loaded: LoadedModel

    @property
    def block(self) -> ModelBlock:
        """The model."""
        return self.loaded.block

    @property
    def tokenizer(self) -> Any:
        """Of transformers."""
        return self.loaded.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.loaded.device

    def capture(self, request: CaptureRequest) -> Captured:
        """Sums over rows; the first thing that is asked."""
        moments = with_transformers.capture(
            self.loaded,
            request.data,
            needs=request.needs,
            progress=request.progress,
            work=request.work,
            resume=request.resume,
        )
        moments = replace(moments, geometry=self.block.geometry)
        coverage.check(moments, request.needs)
        seen = coverage.observed(moments)
        return Captured(moments, with_transformers.numerics(self.loaded), seen)

    def held_out_rows(
        self, sequences: Sequence[Sequence[int]], windows: Windows, *, tick: Ticks
    ) -> HeldOutRows:
        """Rows to measure fits on; see `held_out_rows`."""
        return collect(self.loaded, sequences, windows, tick=tick)

    def calibration_rows(
        self, sequences: Sequence[Sequence[int]], group_size: int, *, tick: Ticks
    ) -> CalibrationRows:
        """Rows to tune methods on; see `calibration_rows`."""
        return collect_rows(self.loaded, sequences, group_size, tick=tick)

    def measure(
        self, task: Task, cache: CacheSpec | None, *, tick: Callable[[], None]
    ) -> Measurement:
        """Run every prompt of `task`; see `evaluate.tasks.base.measure`.

        Args:
            cache: the INT2 cache to simulate at every position; `None` for the model's own.
        """
        return measure(self.loaded, task, cache, tick=tick)
