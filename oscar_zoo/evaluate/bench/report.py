"""What `bench serve` prints: every side with what was measured of it, and the ratios that follow.

INT2 is compared with each stock cache that was measured. Where that cache was measured with several
attention backends, each ratio takes the best of them.
"""

from __future__ import annotations

import csv
import io
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, computed_field

from oscar_zoo.artifact.outcome import HIDDEN, says
from oscar_zoo.engines.sglang.offline_process import Bulk, Case

NO_RATIO = "a CPU runs INT2 in plain PyTorch: times show that it works, not how fast; use a GPU"
Cache = Literal["bf16", "fp8", "int2"]
CACHES: tuple[Cache, ...] = get_args(Cache)
STOCK: tuple[Cache, ...] = ("bf16", "fp8")
"""The caches that INT2 is compared with."""
LABELS: dict[Cache, str] = {cache: cache.upper() for cache in CACHES}
Number = Literal["ttft_s", "ttft_median_s", "ms_per_token", "tokens_per_second"]
NUMBERS: tuple[Number, ...] = get_args(Number)
Figures = dict[Number, float | None]
"""One repeat of a case; `None` where it had too few tokens for a figure."""
Ratio = Literal["int2_over_bf16", "int2_over_fp8"]
RATIOS: dict[Cache, Ratio] = dict(zip(STOCK, get_args(Ratio), strict=True))
Ratios = Annotated[dict[Ratio, float | None], says("INT2 over each other cache.")]
Best = Annotated[
    dict[Literal["bf16", "fp8"], str | None],
    says("The attention backend with which each cache takes the least time; see the ratios."),
]
Stopped = Annotated[Literal["SIGINT", "SIGTERM"] | None, says("The signal that ended it early.")]
Batch = Annotated[int, says("Requests at the same time.", ge=1)]
Context = Annotated[int, says("Tokens of a prompt.", ge=1)]
Median = float | None


@dataclass
class CaseResult:
    """One case on one side: medians over the repeats that were measured."""

    batch: Batch
    context: Context
    wanted: Annotated[int, *HIDDEN]
    repeats: Annotated[int, says("That were measured.", ge=0)] = 0
    ttft_s: Annotated[Median, says("Seconds to the first token of the last request.")] = None
    ttft_median_s: Annotated[Median, says("The median over the requests.")] = None
    ms_per_token: Annotated[Median, says("Median time between two tokens of a request.")] = None
    tokens_per_second: Annotated[Median, says("New tokens of all requests together.")] = None
    spread: Annotated[
        dict[Number, tuple[float, float] | None],
        says("The smallest and the largest of the repeats."),
    ] = field(default_factory=lambda: dict.fromkeys(NUMBERS))
    note: Annotated[str | None, says("Why there are no figures, or fewer repeats.")] = None
    refused: Annotated[bool, *HIDDEN] = False
    measured: Annotated[list[Figures], *HIDDEN] = field(default_factory=list)

    @property
    def case(self) -> Case:
        return Case(batch=self.batch, context=self.context)

    def add(self, figures: Figures) -> None:
        """One more repeat; one with too few tokens for one figure still counts for the others."""
        self.measured.append(figures)
        self.repeats = len(self.measured)
        for name in NUMBERS:
            seen = [value for one in self.measured if (value := one[name]) is not None]
            setattr(self, name, statistics.median(seen) if seen else None)
            self.spread[name] = (min(seen), max(seen)) if seen else None
        few = self.repeats < self.wanted
        self.note = f"measured {self.repeats} of {self.wanted} times" if few else None

    def refuse(self, why: str) -> None:
        """The engine cannot run it, or not again."""
        self.note, self.refused = why, True


@dataclass(frozen=True)
class Turn:
    seconds: float
    reused: Annotated[float, says("Of the prompts, from the prefix cache.", ge=0, le=1)]


@dataclass(frozen=True)
class JobResult:
    turns: tuple[Turn, ...] = ()
    refused: Annotated[str | None, says("Why it could not run.")] = None

    @computed_field(description="Of all turns.")  # type: ignore[prop-decorator]
    @property
    def seconds(self) -> float | None:
        return sum(turn.seconds for turn in self.turns) if self.turns else None


@dataclass
class Side:
    """One engine of a comparison, and what was measured of it. Without an error it has every case
    of the job, and else the last one may lack repeats."""

    cache: Cache
    backend: Annotated[
        str | None,
        says(
            "Attention backend that was asked for; null where the engine chooses, as for INT2.",
            serialization_alias="baseline",
        ),
    ] = None
    alone: Annotated[bool, *HIDDEN] = True
    """Whether no other side has this cache."""
    sglang: Annotated[str | None, says("Version.")] = None
    vllm: Annotated[str | None, says("Version; null with SGLang.")] = None
    engine: Annotated[dict[str, str], says("Settings in force.")] = field(default_factory=dict)
    start_s: Annotated[float | None, says("Seconds until the engine was ready.")] = None
    capacity: Annotated[
        int | None, says("That the cache holds.", ge=0, serialization_alias="capacity_tokens")
    ] = None
    cases: list[CaseResult] = field(default_factory=list)
    job: JobResult | None = None
    error: Annotated[str | None, says("Why the side ended early.")] = None

    @property
    def name(self) -> str:
        """For files: `bf16`, or `bf16-fa3` where several sides have a BF16 cache."""
        return self.cache if self.alone else f"{self.cache}-{self.backend}"

    @property
    def log(self) -> str:
        return f"bench-{self.name}"

    @property
    def label(self) -> str:
        """For people: `BF16`, or `BF16 fa3`."""
        return LABELS[self.cache] if self.alone else f"{LABELS[self.cache]} {self.backend}"

    @property
    def measured(self) -> bool:
        return self.time() is not None or any(result.repeats for result in self.cases)

    def of(self, case: Case) -> CaseResult | None:
        return next((result for result in self.cases if result.case == case), None)

    def turn(self, number: int) -> Turn | None:
        turns = () if self.job is None else self.job.turns
        return turns[number] if number < len(turns) else None

    def time(self, case: Case | None = None, turn: int | None = None) -> float | None:
        """Milliseconds per token of a case, or seconds of a turn of the job, or of all its
        turns; `None` when they were not measured."""
        if case is not None:
            value: float | None = getattr(self.of(case), "ms_per_token", None)
            return value
        if turn is None:
            return None if self.job is None else self.job.seconds
        found = self.turn(turn)
        return None if found is None else found.seconds


@dataclass(frozen=True)
class MeasuredArtifact:
    name: Annotated[str, says("As it was asked for: a name, or a folder.")]
    digest: str


@dataclass(frozen=True)
class Speedup:
    batch: Batch
    context: Context
    int2_over_bf16: float | None
    int2_over_fp8: float | None
    best: Best


@dataclass(frozen=True)
class JobRatios:
    """Requests that all came at once, and the ratios of their throughput."""

    requests: Annotated[int, Field(ge=1)]
    context: Context
    new_tokens: Annotated[int, says("Of every answer.", ge=1)]
    turns: Annotated[int, says("Of every conversation.", ge=1)]
    int2_over_bf16: float | None
    int2_over_fp8: float | None
    best: Best
    turn_ratios: tuple[Ratios, ...]


@dataclass
class Report:
    """What oscar-zoo bench serve prints: an engine with BF16, FP8 and INT2 caches. Figures are
    medians over the repeats. Ratios are null where a side failed or was not asked for, or the
    machine cannot compare."""

    model: str
    weights: Literal["random", "loaded"]
    artifact: MeasuredArtifact
    device: Annotated[str, says("Name of the GPU, or CPU.")]
    new_tokens: Annotated[int, says("Of every request.", ge=0)]
    cases: Annotated[tuple[Case, ...], *HIDDEN]
    sides: Annotated[list[Side], says("Those that were started, in that order.")]
    repeats: Annotated[int, says("How often each case was to be timed.", ge=1)] = 1
    bulk: Annotated[Bulk | None, *HIDDEN] = None
    stopped: Stopped = None
    schema: Literal["oscar-zoo.bench-serve/2"] = "oscar-zoo.bench-serve/2"

    @computed_field(
        alias="speedup",
        description="Time of one decode step with another cache over the time with INT2, by case.",
    )
    def speedups(self) -> tuple[Speedup, ...]:
        return tuple(
            Speedup(
                **case.model_dump(),
                **self.ratios(partial(self.speedup, case=case)),
                best=self._backends(case),
            )
            for case in self.cases
        )

    @computed_field(
        alias="capacity_ratio",
        description="Tokens in the INT2 cache for each token in the other cache.",
    )
    def capacity_ratios(self) -> Ratios:
        return self.ratios(self.capacity_ratio)

    @computed_field(description="Why there are no ratios.")  # type: ignore[prop-decorator]
    @property
    def not_compared(self) -> str | None:
        return NO_RATIO if self.device == "CPU" else None

    @computed_field(description="Requests that all came at once, if asked for.")
    def job(self) -> JobRatios | None:
        if self.bulk is None:
            return None
        turns = range(self.bulk.turns)
        return JobRatios(
            **self.bulk.model_dump(),
            **self.ratios(self.speedup),
            best=self._backends(),
            turn_ratios=tuple(self.ratios(partial(self.speedup, turn=one)) for one in turns),
        )

    @property
    def exit_code(self) -> int:
        if self.stopped is not None:
            return 128 + signal.Signals[self.stopped]
        return int(any(side.error is not None for side in self.sides))

    @property
    def compared(self) -> tuple[Cache, ...]:
        """The stock caches that INT2 can be compared with in this report."""
        there = {side.cache for side in self.sides}
        known = "int2" in there and self.not_compared is None
        return tuple(cache for cache in STOCK if known and cache in there)

    def best(self, cache: Cache, case: Case | None = None) -> Side | None:
        """The side with this cache that takes the least time for a case, or for the whole job."""
        timed = [one for one in self.sides if one.cache == cache and one.time(case) is not None]
        return min(timed, key=lambda one: one.time(case) or 0.0, default=None)

    def speedup(
        self, over: Cache, case: Case | None = None, turn: int | None = None
    ) -> float | None:
        """Time of the best side with the cache `over` over the time with INT2, as `Side.time`
        has it; a turn is taken from the side with the best whole job."""
        stock, int2 = self.best(over, case), self.best("int2", case)
        if stock is None or int2 is None:
            return None
        return self._quotient(stock.time(case, turn), int2.time(case, turn))

    def capacity(self, cache: Cache) -> int:
        return max((side.capacity or 0 for side in self.sides if side.cache == cache), default=0)

    def capacity_ratio(self, over: Cache) -> float | None:
        """Tokens in the INT2 cache per token in the largest cache `over`."""
        return self._quotient(self.capacity("int2"), self.capacity(over))

    def ratios(self, of: Callable[[Cache], float | None]) -> dict[Any, Any]:
        """A ratio to each stock cache by its name; `None` where it was not measured."""
        return {name: of(cache) for cache, name in RATIOS.items()}

    def _backends(self, case: Case | None = None) -> dict[Any, str | None]:
        best = {cache: self.best(cache, case) for cache in STOCK}
        return {cache: None if side is None else side.backend for cache, side in best.items()}

    def _quotient(self, above: float | None, below: float | None) -> float | None:
        """`above / below`, if both were measured and the machine can be compared."""
        return above / below if above and below and self.not_compared is None else None


ENDS = ("min", "max")
COLUMNS = (
    *("cache", "attention_backend", "batch", "context", "new_tokens", "repeats"),
    *(name for number in NUMBERS for name in (number, *(f"{number}_{end}" for end in ENDS))),
    *("job_turn", "job_s", "job_reused", *RATIOS.values()),
    *("capacity_tokens", *(f"capacity_{name}" for name in RATIOS.values()), "note"),
)


def as_csv(report: Report) -> str:
    """One line per side and case, and per turn of the job; a missing number is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for side in report.sides:
        shared: dict[str, Any] = {
            "cache": side.cache,
            "attention_backend": side.engine.get("attention_backend", side.backend),
            "capacity_tokens": side.capacity,
        }
        if side.cache == "int2":
            capacities = report.ratios(report.capacity_ratio)
            shared |= {f"capacity_{name}": value for name, value in capacities.items()}
        for row in (*_case_rows(report, side), *_turn_rows(report, side)):
            writer.writerow(shared | row)
    return stream.getvalue()


def _case_rows(report: Report, side: Side) -> Iterator[dict[str, Any]]:
    for case in report.cases:
        result = side.of(case) or CaseResult(**case.model_dump(), wanted=0, note="not measured")
        row = {**case.model_dump(), "new_tokens": report.new_tokens, "repeats": result.repeats}
        for name in NUMBERS:
            row[name] = getattr(result, name)
            ends = result.spread[name] or (None, None)
            row |= {f"{name}_{end}": value for end, value in zip(ENDS, ends, strict=True)}
        if side.cache == "int2":
            row |= report.ratios(partial(report.speedup, case=case))
        yield row | {"note": result.note}


def _turn_rows(report: Report, side: Side) -> Iterator[dict[str, Any]]:
    bulk = report.bulk
    for number in range(bulk.turns if bulk else 0):
        assert bulk is not None
        turn = side.turn(number)
        row = {
            "batch": bulk.requests,
            "context": bulk.prompt(number),
            "new_tokens": bulk.new_tokens,
            "tokens_per_second": bulk.requests * bulk.new_tokens / turn.seconds if turn else None,
            "job_turn": number + 1,
            "job_s": turn and turn.seconds,
            "job_reused": turn and turn.reused,
            "note": "not measured" if side.job is None else side.job.refused,
        }
        if side.cache == "int2":
            row |= report.ratios(partial(report.speedup, turn=number))
        yield row
