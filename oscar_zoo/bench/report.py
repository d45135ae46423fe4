"""A comparison and the ratios that follow from it. Pure.

INT2 is compared with each stock cache that was measured. Where that cache was measured with several
attention backends, each ratio takes the best of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oscar_zoo.bench.run import CaseResult, SideResult, TurnResult
from oscar_zoo.bench.sides import CACHES, Cache, Side
from oscar_zoo.engines.sglang.offline_job import Bulk, Case

NO_RATIO = "a CPU runs INT2 in plain PyTorch: times show that it works, not how fast; use a GPU"
INT2 = Side("int2")
STOCK: tuple[Cache, ...] = tuple(cache for cache in CACHES if cache != INT2.cache)
"""The caches that INT2 is compared with."""


@dataclass(frozen=True)
class Report:
    """All sides over the same cases.

    Attributes:
        model: name of the model.
        random_weights: whether its weights were random.
        artifact: label and digest of the rotations of the INT2 side.
        device: name of the machine's GPU, or `CPU`.
        new_tokens: of every request.
        cases: the cases in order.
        sides: results by side, in the order in which they ran.
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
