"""A comparison as data: one JSON object, and rows for a CSV file. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from oscar_zoo.bench.report import INT2, STOCK, Report
from oscar_zoo.bench.run import CaseResult, SideResult
from oscar_zoo.bench.sides import Cache, Side
from oscar_zoo.bench.timing import NUMBERS
from oscar_zoo.engines.sglang.offline_job import Bulk, Case

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
