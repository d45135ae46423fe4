"""The comparison as data: one JSON object, and rows for a CSV file. Pure."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from typing import Any

from oscar_zoo.bench.run import CaseResult, SideResult, TurnResult
from oscar_zoo.bench.sides import Cache
from oscar_zoo.engines.sglang.offline_job import Bulk, Case

SCHEMA = "oscar-zoo.bench-serve/1"
NO_RATIO = "a CPU runs INT2 in plain PyTorch: times show that it works, not how fast; use a GPU"
LABELS: dict[Cache, str] = {"bf16": "BF16", "int2": "INT2"}
NUMBERS = ("ttft_s", "ttft_median_s", "ms_per_token", "tokens_per_second")
IDENTITY = ("cache", "attention_backend", "batch", "context", "new_tokens")
COLUMNS = (*IDENTITY, *NUMBERS, "job_turn", "job_s", "job_reused", "capacity_tokens", "note")


@dataclass(frozen=True)
class Report:
    """Both sides over the same cases.

    Attributes:
        model: name of the model.
        random_weights: whether its weights were random.
        artifact: label and digest of the rotations of the INT2 side.
        device: name of the machine's GPU, or `CPU`.
        new_tokens: of every request.
        cases: the cases in order.
        sides: results by cache, in the order in which they ran.
        bulk: the job after the cases, or `None`.
        stopped: the signal that ended it early, `SIGINT` or `SIGTERM`.
    """

    model: str
    random_weights: bool
    artifact: tuple[str, str]
    device: str
    new_tokens: int
    cases: tuple[Case, ...]
    sides: dict[Cache, SideResult]
    bulk: Bulk | None = None
    stopped: str | None = None

    @property
    def not_compared(self) -> str | None:
        """Why the report has no ratios, or `None` if it has."""
        return NO_RATIO if self.device == "CPU" else None

    @property
    def errors(self) -> dict[Cache, str]:
        """One line per side that ended early."""
        return {cache: side.error for cache, side in self.sides.items() if side.error is not None}

    @property
    def capacity_ratio(self) -> float | None:
        """Tokens in the INT2 cache per token in the BF16 cache."""
        bf16, int2 = (
            getattr(self.sides.get(cache), "capacity", None) for cache in ("bf16", "int2")
        )
        return self._ratio(int2, bf16)

    def note(self, cache: Cache, case: Case) -> str | None:
        """Why a case has no figures, or `None`."""
        result = self._result(cache, case)
        return "not measured" if result is None else result.refused

    def speedup(self, case: Case) -> float | None:
        """Time of one decode step with BF16 over the time with INT2."""
        bf16, int2 = self._result("bf16", case), self._result("int2", case)
        slow, fast = _number(bf16, "ms_per_token"), _number(int2, "ms_per_token")
        return self._ratio(slow, fast)

    def turn(self, cache: Cache, number: int) -> TurnResult | None:
        """Turn 0, 1, ... of the job; `None` when it was not measured."""
        side = self.sides.get(cache)
        turns = side.bulk.turns if side is not None and side.bulk is not None else ()
        return turns[number] if number < len(turns) else None

    def job_seconds(self, cache: Cache) -> float | None:
        """Seconds of all turns of the job, or `None` when it was not measured."""
        side = self.sides.get(cache)
        return None if side is None or side.bulk is None else side.bulk.seconds

    @property
    def job_speedup(self) -> float | None:
        """Throughput of INT2 over the throughput of BF16 in the whole job."""
        return self._ratio(self.job_seconds("bf16"), self.job_seconds("int2"))

    def turn_speedup(self, number: int) -> float | None:
        """The same for one turn of the job."""
        bf16, int2 = self.turn("bf16", number), self.turn("int2", number)
        return self._ratio(bf16.seconds, int2.seconds) if bf16 and int2 else None

    def to_json(self) -> dict[str, Any]:
        """The whole report, with the name of its schema."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "weights": "random" if self.random_weights else "loaded",
            "artifact": {"name": self.artifact[0], "digest": self.artifact[1]},
            "device": self.device,
            "new_tokens": self.new_tokens,
            "sides": {cache: self._side(side) for cache, side in self.sides.items()},
            "speedup": [
                {**case.model_dump(), "int2_over_bf16": self.speedup(case)} for case in self.cases
            ],
            "capacity_ratio": self.capacity_ratio,
            "not_compared": self.not_compared,
            "stopped": self.stopped,
            "job": None if self.bulk is None else self._job(self.bulk),
        }

    def to_csv(self) -> str:
        """One line per side and case; a missing number is empty."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for cache, side in self.sides.items():
            for case in self.cases:
                result = side.of(case)
                row: dict[str, Any] = {
                    "cache": cache,
                    "attention_backend": side.engine.get("attention_backend"),
                }
                row |= {
                    **case.model_dump(),
                    "new_tokens": self.new_tokens,
                    "capacity_tokens": side.capacity,
                }
                row |= {name: _number(result, name) for name in NUMBERS}
                writer.writerow(row | {"note": self.note(cache, case)})
            if self.bulk is not None:
                writer.writerows(
                    self._job_row(cache, side, self.bulk, turn) for turn in range(self.bulk.turns)
                )
        return stream.getvalue()

    def _ratio(self, above: float | None, below: float | None) -> float | None:
        """`above / below`, if both were measured and the machine can be compared."""
        return above / below if above and below and self.not_compared is None else None

    def _result(self, cache: Cache, case: Case) -> CaseResult | None:
        side = self.sides.get(cache)
        return None if side is None else side.of(case)

    def _job(self, bulk: Bulk) -> dict[str, Any]:
        turns = [self.turn_speedup(number) for number in range(bulk.turns)]
        return {
            **bulk.model_dump(),
            "int2_over_bf16": self.job_speedup,
            "turns_int2_over_bf16": turns,
        }

    def _job_row(self, cache: Cache, side: SideResult, bulk: Bulk, number: int) -> dict[str, Any]:
        turn = self.turn(cache, number)
        return {
            "cache": cache,
            "attention_backend": side.engine.get("attention_backend"),
            "batch": bulk.requests,
            "context": bulk.prompt(number),
            "new_tokens": bulk.new_tokens,
            "tokens_per_second": bulk.requests * bulk.new_tokens / turn.seconds if turn else None,
            "job_turn": number + 1,
            "job_s": turn and turn.seconds,
            "job_reused": turn and turn.reused,
            "capacity_tokens": side.capacity,
            "note": "not measured" if side.bulk is None else side.bulk.refused,
        }

    def _side(self, side: SideResult) -> dict[str, Any]:
        return {
            "sglang": side.sglang,
            "engine": side.engine,
            "start_s": side.up_s,
            "capacity_tokens": side.capacity,
            "cases": [_case(result) for result in side.cases],
            "job": None
            if side.bulk is None
            else {"seconds": side.bulk.seconds, **asdict(side.bulk)},
            "error": side.error,
        }


def _case(result: CaseResult) -> dict[str, Any]:
    numbers = asdict(result.figures) if result.figures else {}
    return {
        **result.case.model_dump(),
        **{name: numbers.get(name) for name in NUMBERS},
        "note": result.refused,
    }


def _number(result: CaseResult | None, name: str) -> float | None:
    value = (
        getattr(result.figures, name) if result is not None and result.figures is not None else None
    )
    return None if value is None else float(value)
