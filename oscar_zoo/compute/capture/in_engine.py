"""A model in an inference engine: rows come from its ranks in files, and an INT2 cache is simulated
by the ranks, each for its own heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.model_block import ModelBlock
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute import coverage
from oscar_zoo.compute.capture.cache_files import write_cache
from oscar_zoo.compute.capture.calibration_rows import CalibrationRows, RowsOfSequences, cut
from oscar_zoo.compute.capture.engine import capture_with_engine
from oscar_zoo.compute.capture.engine_job import ProjectionsJob, RowsJob, Scored, ScoreJob
from oscar_zoo.compute.capture.engine_session import EngineSession
from oscar_zoo.compute.capture.held_out_rows import HeldOutRows
from oscar_zoo.compute.capture.rank_rows import JoinedRows, read_projection, read_rows
from oscar_zoo.compute.capture.run import Captured, CaptureRequest
from oscar_zoo.compute.capture.running import Ticks
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.tasks.base import Measurement, Predictions, Task, TaskPrompt


@dataclass
class InEngine:
    """A model in an engine: a `RunningModel`.

    Attributes:
        session: the engine.
        block: the model that it must turn out to hold.
        tokenizer: of transformers.
        device: where this process computes with rows.
        dtype: of the rows; the capture finds it out.
    """

    session: EngineSession
    block: ModelBlock
    tokenizer: Any
    device: torch.device
    dtype: str = "bfloat16"

    def capture(self, request: CaptureRequest) -> Captured:
        """See `RunningModel`; raises as `capture_with_engine`."""
        moments, facts = capture_with_engine(
            self.session,
            request.data.sequences,
            needs=request.needs,
            geometry=self.block.geometry,
            progress=request.progress,
            resume=request.resume,
        )
        seen = coverage.observed(moments, tp=facts.tensor_parallel)
        self.dtype = facts.numerics.forward_dtype
        return Captured(moments, facts.numerics, seen)

    def held_out_rows(
        self, sequences: Sequence[Sequence[int]], windows: Windows, *, tick: Ticks
    ) -> HeldOutRows:
        """See `RunningModel`."""
        weights = self.session.new_folder()
        self.session.run(ProjectionsJob(place=str(weights)))
        kept = HeldOutRows(windows, self.device, partial(read_projection, weights))

        def see(layer_id: int, rows: JoinedRows) -> None:
            assert rows.query is not None  # asked for below
            query, key, value = (x.to(self.device) for x in (rows.query, rows.key, rows.value))
            kept.add(layer_id, query, key, value, rows.softmax.to(self.device))

        self._rows(sequences, see, tick, queries=True)
        return kept

    def calibration_rows(
        self, sequences: Sequence[Sequence[int]], group_size: int, *, tick: Ticks
    ) -> CalibrationRows:
        """See `RunningModel`."""
        seen = RowsOfSequences()
        self._rows(
            cut(sequences, self.block, self.dtype),
            lambda layer_id, rows: seen.add(layer_id, rows.key, rows.value),
            tick,
            queries=False,
        )
        return seen.joined(self.device, group_size)

    def measure(
        self, task: Task, cache: CacheSpec | None, *, tick: Callable[[], None]
    ) -> Measurement:
        """See `RunningModel`."""
        place = ""
        if cache is not None:
            cache.check(self.block)
            folder = self.session.new_folder() / "cache"
            write_cache(folder, cache)
            place = str(folder)
        parts = []
        for prompt in task.prompts:
            parts.append(task.count(prompt, self._predict(prompt, place)))
            tick()
        if place:
            durable.remove_tree(Path(place).parent)
        return Measurement.of(task, parts)

    def _predict(self, prompt: TaskPrompt, cache: str) -> Predictions:
        first = int(prompt.scored[0])
        job = ScoreJob(cache=cache, ids=tuple(prompt.ids.tolist()), first=first)
        said = Scored.model_validate(self.session.run(job), strict=False)
        places = prompt.scored - first
        best = torch.tensor(said.best, device="cpu")[places]
        return Predictions(
            -torch.tensor(said.log_probabilities, dtype=torch.float64, device="cpu")[places],
            best == prompt.targets,
        )

    def _rows(
        self,
        sequences: Sequence[Sequence[int]],
        see: Callable[[int, JoinedRows], None],
        tick: Ticks,
        *,
        queries: bool,
    ) -> None:
        """Show the rows of one layer and sequence after the other; files of one sequence at a
        time."""
        for number, ids in enumerate(sequences, 1):
            place = self.session.new_folder()
            self.session.run(RowsJob(place=str(place), ids=tuple(ids), queries=queries))
            for layer_id in self.block.attention_layers:
                see(layer_id, read_rows(place, layer_id))
            durable.remove_tree(place)
            tick(number, len(sequences))
