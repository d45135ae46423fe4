"""The jobs of `compute/capture/engine_job.py`, each as requests to an SGLang engine and calls of
the taps in its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.base import Progress
from oscar_zoo.compute.capture.engine_job import (
    CaptureJob,
    Job,
    ProjectionsJob,
    RowsJob,
    Scored,
    ScoreJob,
)
from oscar_zoo.compute.capture.rank_store import Done, RankStore


class TappedEngine:
    """Runs jobs.

    Args:
        engine: SGLang's.
        folder: where the ranks report failures.
        version: of SGLang.
    """

    def __init__(self, engine: Any, folder: str, version: str) -> None:
        self._engine, self._folder, self._version = engine, folder, version
        self._cache: str | None = None  # whatever it is, it still sums

    def run(self, job: Job, progress: Progress) -> Any:
        """The result of a job, as `engine_job` says.

        Raises:
            OscarZooError: a rank reports one.
            Exception: an error of the engine.
        """
        if isinstance(job, CaptureJob):
            return self._capture(job, progress)
        if isinstance(job, ScoreJob):
            return self._score(job).model_dump()
        if isinstance(job, ProjectionsJob):
            return self._call("project", place=job.place)
        assert isinstance(job, RowsJob)
        self._use("")
        self._call("keep", place=job.place, queries=job.queries)
        self._generate(job.ids)
        self._call("keep", place="", queries=False)
        return None

    def _capture(self, job: CaptureJob, progress: Progress) -> str:
        store = RankStore(Path(job.store), job.facts, job.pace)
        at = store.load()
        self._call("start", outputs=job.outputs, weights=job.weights)
        if at is not None:
            self._call("load", place=str(at.folder))
        self._passes(job, store, at or Done(1, 0, Path()), progress)
        return self._version

    def _passes(self, job: CaptureJob, store: RankStore, at: Done, progress: Progress) -> None:
        """Run every pass that is left after `at`, and save at the end."""
        total = sum(map(len, job.sequences))

        def save(place: Path) -> None:
            self._call("save", place=str(place))

        for number in range(at.number, job.passes + 1):
            if number == 2:
                self._call("weigh")
            first = at.sequences if number == at.number else 0
            for count, sequence in enumerate(job.sequences[first:], first + 1):
                self._generate(sequence)
                self._call("check")
                if store.due() or (number, count) == (job.passes, len(job.sequences)):
                    store.save(number, count, save)
                done = job.tokens_done(Done(number, count, Path()))
                progress(done, total, f"pass {number} of {job.passes}")

    def _score(self, job: ScoreJob) -> Scored:
        self._use(job.cache)
        meta = self._generate(
            job.ids, return_logprob=True, logprob_start_len=job.first, top_logprobs_num=1
        )[0]["meta_info"]
        self._call("check")
        given, best = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
        wanted = job.ids[job.first + 1 :]
        # SGLang calls the last token of a vocabulary 0 where it names prompt tokens.
        if len(given) != len(wanted) or any(
            token not in (true, 0) for (_, token, *_), true in zip(given, wanted, strict=True)
        ):
            raise RuntimeError(f"{len(given)} log-probabilities, or not of the prompt")
        return Scored(
            log_probabilities=tuple(float(value) for value, *_ in given),
            best=tuple(int(place[0][1]) for place in best),
        )

    def _use(self, cache: str) -> None:
        """Let attention read an INT2 cache from now on; empty for the engine's own."""
        if cache != self._cache:
            self._call("simulate", place=cache)
            self._cache = cache

    def _generate(self, ids: tuple[int, ...], **options: Any) -> Any:
        """One prefill of a whole sequence."""
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        return self._engine.generate(input_ids=[list(ids)], sampling_params=sampling, **options)

    def _call(self, step: str, **options: bool | str) -> None:
        """Call a step of the tap on all ranks.

        SGLang passes on only the error of the first rank; the other ranks report theirs in files.
        """
        self._engine.collective_rpc(f"oscar_tap_{step}", folder=self._folder, **options)
        ranks.raise_failure(Path(self._folder))
