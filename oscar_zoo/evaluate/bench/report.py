"""A comparison, the ratios that follow from it, and both as JSON and CSV. Pure.

INT2 is compared with each stock cache that was measured. Where that cache was measured with several
attention backends, each ratio takes the best of them.
"""

from __future__ import annotations

import csv
import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from oscar_zoo.engines.sglang.offline_process import Bulk, Case
from oscar_zoo.evaluate.bench.run import NUMBERS, CaseResult, SideResult, TurnResult
from oscar_zoo.evaluate.bench.sides import CACHES, Cache, Side

NO_RATIO = "a CPU runs INT2 in plain PyTorch: times show that it works, not how fast; use a GPU"
INT2 = Side("int2")
STOCK: tuple[Cache, ...] = tuple(cache for cache in CACHES if cache != INT2.cache)
"""The caches that INT2 is compared with."""


@dataclass(frozen=True)
class Report:
    """All sides, in the order in which they ran, over the same cases.

    Attributes:
        artifact: label and digest of the rotations of the INT2 side.
        device: name of the machine's GPU, or `CPU`.
        repeats: how often each case was to be timed.
        bulk: the job after the cases, or `None`.
        stopped: the signal that ended it early, `SIGINT` or `SIGTERM`.
    """

    model: str
    random_weights: bool
    artifact: tuple[str, str]
    device: str
    new_tokens: int
    cases: tuple[Case, ...]
    sides: dict[Side, SideResult]
    repeats: int = 1
    bulk: Bulk | None = None
    stopped: str | None = None

    @property
    def exit_code(self) -> int:
        """128 and the signal that ended it early, 1 where a side failed, else 0."""
        if self.stopped is not None:
            return 128 + signal.Signals[self.stopped]
        return int(bool(self.errors))

    def to_json(self) -> dict[str, Any]:
        """The whole report, with the name of its schema."""
        return as_json(self)

    @property
    def not_compared(self) -> str | None:
        """Why the report has no ratios, or `None` if it has."""
        return NO_RATIO if self.device == "CPU" else None

    @property
    def errors(self) -> dict[Side, str]:
        """One line per side that ended early."""
        return {side: found.error for side, found in self.sides.items() if found.error is not None}

    @property
    def compared(self) -> tuple[Cache, ...]:
        """The stock caches that INT2 can be compared with in this report."""
        if INT2 not in self.sides or self.not_compared is not None:
            return ()
        return tuple(cache for cache in STOCK if any(side.cache == cache for side in self.sides))

    def result(self, side: Side, case: Case) -> CaseResult | None:
        """The result of one case, or `None` when it was not begun."""
        found = self.sides.get(side)
        return None if found is None else found.of(case)

    def number(self, side: Side, case: Case, name: str) -> float | None:
        """The median of the figure `name`, or `None` where it was not measured."""
        result = self.result(side, case)
        figures = None if result is None else result.figures
        value = None if figures is None else getattr(figures, name)
        return None if value is None else float(value)

    def note(self, side: Side, case: Case) -> str | None:
        """Why a case has no figures or lacks repeats, or `None`."""
        result = self.result(side, case)
        if result is None:
            return "not measured"
        if result.refused is not None or len(result.repeats) == self.repeats:
            return result.refused
        return f"measured {len(result.repeats)} of {self.repeats} times"

    def best(self, cache: Cache, case: Case) -> Side | None:
        """The side with this cache that takes the least time per token, or `None` without any."""
        return self._least(cache, lambda side: self.number(side, case, "ms_per_token"))

    def speedup(self, case: Case, over: Cache) -> float | None:
        """Time of one decode step with the cache `over` over the time with INT2."""
        best = self.best(over, case)
        stock = None if best is None else self.number(best, case, "ms_per_token")
        return self._ratio(stock, self.number(INT2, case, "ms_per_token"))

    def capacity_ratio(self, over: Cache) -> float | None:
        """Tokens in the INT2 cache per token in the cache `over`."""
        found = (result.capacity for side, result in self.sides.items() if side.cache == over)
        int2 = self.sides.get(INT2, SideResult()).capacity
        return self._ratio(int2, max((tokens or 0 for tokens in found), default=None))

    def turn(self, side: Side, number: int) -> TurnResult | None:
        """Turn 0, 1, ... of the job; `None` when it was not measured."""
        found = self.sides.get(side)
        turns = found.bulk.turns if found is not None and found.bulk is not None else ()
        return turns[number] if number < len(turns) else None

    def turn_seconds(self, side: Side, number: int) -> float | None:
        """Seconds of one turn of the job, or `None` when it was not measured."""
        turn = self.turn(side, number)
        return None if turn is None else turn.seconds

    def job_seconds(self, side: Side) -> float | None:
        """Seconds of all turns of the job, or `None` when it was not measured."""
        found = self.sides.get(side)
        return None if found is None or found.bulk is None else found.bulk.seconds

    def best_job(self, cache: Cache) -> Side | None:
        """The side with this cache that takes the least time for the whole job, or `None`."""
        return self._least(cache, self.job_seconds)

    def job_speedup(self, over: Cache) -> float | None:
        """Throughput of INT2 over the throughput with the cache `over` in the whole job."""
        best = self.best_job(over)
        stock = None if best is None else self.job_seconds(best)
        return self._ratio(stock, self.job_seconds(INT2))

    def turn_speedup(self, number: int, over: Cache) -> float | None:
        """The same for one turn of the job, with the side that has the best whole job."""
        best = self.best_job(over)
        stock = None if best is None else self.turn_seconds(best, number)
        return self._ratio(stock, self.turn_seconds(INT2, number))

    def _least(self, cache: Cache, value: Callable[[Side], float | None]) -> Side | None:
        """The side with this cache that has the smallest value."""
        known = {
            side: found
            for side in self.sides
            if side.cache == cache and (found := value(side)) is not None
        }
        return min(known, key=known.__getitem__, default=None)

    def _ratio(self, above: float | None, below: float | None) -> float | None:
        """`above / below`, if both were measured and the machine can be compared."""
        return above / below if above and below and self.not_compared is None else None


SCHEMA = "oscar-zoo.bench-serve/2"
RATIOS: dict[Cache, str] = {cache: f"int2_over_{cache}" for cache in STOCK}
"""The names of the ratios by the cache that INT2 is compared with."""
ENDS = ("min", "max")
COLUMNS = (
    *("cache", "attention_backend", "batch", "context", "new_tokens", "repeats"),
    *(name for number in NUMBERS for name in (number, *(f"{number}_{end}" for end in ENDS))),
    *("job_turn", "job_s", "job_reused", *RATIOS.values()),
    *("capacity_tokens", *(f"capacity_{name}" for name in RATIOS.values()), "note"),
)


def as_json(report: Report) -> dict[str, Any]:
    """The whole report, with the name of its schema."""
    return {
        "schema": SCHEMA,
        "model": report.model,
        "weights": "random" if report.random_weights else "loaded",
        "artifact": {"name": report.artifact[0], "digest": report.artifact[1]},
        "device": report.device,
        "new_tokens": report.new_tokens,
        "repeats": report.repeats,
        "sides": [_side(report, side, result) for side, result in report.sides.items()],
        "speedup": [_compared(report, case) for case in report.cases],
        "capacity_ratio": _ratios(report.capacity_ratio),
        "not_compared": report.not_compared,
        "stopped": report.stopped,
        "job": None if report.bulk is None else _job(report, report.bulk),
    }


def as_csv(report: Report) -> str:
    """One line per side and case, and per turn of the job; a missing number is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for side, result in report.sides.items():
        shared: dict[str, Any] = {
            "cache": side.cache,
            "attention_backend": result.engine.get("attention_backend", side.backend),
            "capacity_tokens": result.capacity,
        }
        if side == INT2:
            capacities = _ratios(report.capacity_ratio)
            shared |= {f"capacity_{name}": value for name, value in capacities.items()}
        for row in _case_rows(report, side):
            writer.writerow(shared | row)
        if report.bulk is not None:
            for row in _turn_rows(report, report.bulk, side, result):
                writer.writerow(shared | row)
    return stream.getvalue()


def _case_rows(report: Report, side: Side) -> Iterator[dict[str, Any]]:
    for case in report.cases:
        result = report.result(side, case) or CaseResult(case)
        row = {**case.model_dump(), "new_tokens": report.new_tokens, "repeats": len(result.repeats)}
        row |= {name: report.number(side, case, name) for name in NUMBERS}
        for name, values in result.spread.items():
            row |= {f"{name}_{end}": value for end, value in zip(ENDS, values, strict=True)}
        if side == INT2:
            row |= _ratios(partial(report.speedup, case))
        yield row | {"note": report.note(side, case)}


def _turn_rows(
    report: Report, bulk: Bulk, side: Side, result: SideResult
) -> Iterator[dict[str, Any]]:
    for number in range(bulk.turns):
        turn = report.turn(side, number)
        row = {
            "batch": bulk.requests,
            "context": bulk.prompt(number),
            "new_tokens": bulk.new_tokens,
            "tokens_per_second": bulk.requests * bulk.new_tokens / turn.seconds if turn else None,
            "job_turn": number + 1,
            "job_s": turn and turn.seconds,
            "job_reused": turn and turn.reused,
            "note": "not measured" if result.bulk is None else result.bulk.refused,
        }
        if side == INT2:
            row |= _ratios(partial(report.turn_speedup, number))
        yield row


def _compared(report: Report, case: Case) -> dict[str, Any]:
    best = {cache: report.best(cache, case) for cache in STOCK}
    return {
        **case.model_dump(),
        **_ratios(partial(report.speedup, case)),
        "best": {cache: side and side.backend for cache, side in best.items()},
    }


def _job(report: Report, bulk: Bulk) -> dict[str, Any]:
    best = {cache: report.best_job(cache) for cache in STOCK}
    return {
        **bulk.model_dump(),
        **_ratios(report.job_speedup),
        "best": {cache: side and side.backend for cache, side in best.items()},
        "turn_ratios": [
            _ratios(partial(report.turn_speedup, number)) for number in range(bulk.turns)
        ],
    }


def _ratios(of: Callable[[Cache], float | None]) -> dict[str, float | None]:
    """The ratio to each stock cache by its name; `None` where it was not measured."""
    return {name: of(cache) for cache, name in RATIOS.items()}


def _side(report: Report, side: Side, result: SideResult) -> dict[str, Any]:
    bulk = result.bulk
    return {
        "cache": side.cache,
        "baseline": side.backend,
        "sglang": result.sglang,
        "engine": result.engine,
        "start_s": result.up_s,
        "capacity_tokens": result.capacity,
        "cases": [_case(report, side, case) for case in result.cases],
        "job": None if bulk is None else {"seconds": bulk.seconds, **asdict(bulk)},
        "error": result.error,
    }


def _case(report: Report, side: Side, result: CaseResult) -> dict[str, Any]:
    spread = result.spread
    return {
        **result.case.model_dump(),
        "repeats": len(result.repeats),
        **{name: report.number(side, result.case, name) for name in NUMBERS},
        "spread": {name: list(spread[name]) if name in spread else None for name in NUMBERS},
        "note": report.note(side, result.case),
    }
