"""The comparison as JSON, CSV, table and PNG, from results with every kind of gap."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from oscar_zoo.cli.render.bench import print_serve
from oscar_zoo.engines.sglang.offline_process import Bulk, Case
from oscar_zoo.evaluate.bench.report import COLUMNS, INT2, Report, as_csv, as_json
from oscar_zoo.evaluate.bench.run import BulkResult, CaseResult, Figures, SideResult, TurnResult
from oscar_zoo.evaluate.bench.sides import CACHES, Side, all_sides
from oscar_zoo.evaluate.charts import speed_chart

SMALL, LARGE, LAST = (
    Case(batch=1, context=8000),
    Case(batch=16, context=30000),
    Case(batch=64, context=30000),
)
BF16, FP8, _ = all_sides(CACHES, ["flashinfer"])


def steps(case: Case, *milliseconds: float) -> CaseResult:
    """A case with a repeat for each time of a decode step."""
    return CaseResult(case, tuple(Figures(0.5, 0.4, ms, 1000 / ms) for ms in milliseconds))


@pytest.fixture
def report() -> Report:
    bf16 = SideResult(10.0, 720_000, "0.5.21", {"attention_backend": "flashinfer"})
    bf16.cases = [
        steps(SMALL, 8.0, 8.8, 7.8),
        steps(LARGE, 20.0, 20.0, 20.0),
        CaseResult(LAST, refused="needs 1,926,144 tokens, the cache has 720,000"),
    ]
    fp8 = SideResult(11.0, 1_440_000, "0.5.21", {"attention_backend": "flashinfer"})
    fp8.cases = [steps(SMALL, 6.0, 6.0, 6.5), steps(LARGE, 16.0, 15.0, 16.0), steps(LAST, 60.0)]
    int2 = SideResult(
        12.0, 4_896_000, "0.5.21", {"attention_backend": "oscar_int2"}, error="the engine ended"
    )
    int2.cases = [steps(SMALL, 5.0, 5.0, 5.0), CaseResult(LARGE, (Figures(9.5, 5.2, None, None),))]
    cases, sides = (SMALL, LARGE, LAST), {BF16: bf16, FP8: fp8, INT2: int2}
    return Report("m", True, ("Hadamard", "sha256:0"), "H200", 96, cases, sides, repeats=3)


def rows_of(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(report))))


def test_json_csv_and_table_say_the_same(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert facts["schema"] == "oscar-zoo.bench-serve/2" and facts["weights"] == "random"
    bf16, _, int2 = facts["sides"]
    assert (int2["cache"], int2["baseline"], int2["error"]) == ("int2", None, "the engine ended")
    assert [case["ms_per_token"] for case in bf16["cases"]] == [8.0, 20.0, None]
    assert [case["spread"]["ms_per_token"] for case in bf16["cases"]][::2] == [[7.8, 8.8], None]
    ratios = {"int2_over_bf16": pytest.approx(1.6), "int2_over_fp8": pytest.approx(1.2)}
    best = {"bf16": "flashinfer", "fp8": "flashinfer"}
    assert facts["speedup"][0] == {"batch": 1, "context": 8000, **ratios, "best": best}
    assert report.speedup(LARGE, "bf16") is None and report.speedup(LAST, "fp8") is None
    assert report.capacity_ratio("fp8") == pytest.approx(3.4)
    rows = rows_of(report)
    assert tuple(rows[0]) == COLUMNS and [row["cache"] for row in rows[::3]] == [*CACHES]
    assert (rows[0]["ms_per_token"], rows[0]["ms_per_token_min"]) == ("8.0", "7.8")
    assert {name: float(rows[6][name]) for name in ratios} == ratios
    notes = (report.note(side, case) for side in report.sides for case in report.cases)
    assert [row["note"] or None for row in rows] == list(notes)
    assert (rows[5]["note"], rows[8]["note"]) == ("measured 1 of 3 times", "not measured")
    print_serve(report)
    out = capsys.readouterr().out
    assert "8.00 ms ±10 %" in out and "1.60 x" in out and "(INT2 6.8 times BF16" in out
    assert "FP8 64 x 30,000: measured 1 of 3 times" in out and "INT2 64 x 30,000" not in out
    assert report.exit_code == 1 and replace(report, stopped="SIGINT").exit_code == 130


def test_int2_is_compared_with_the_best_backend_of_each_case(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    fa, fi = (Side("bf16", backend, alone=False) for backend in ("fa3", "flashinfer"))
    second = SideResult(10.0, 700_000, "0.5.21", {"attention_backend": "fa3"})
    second.cases = [steps(SMALL, 9.0), steps(LARGE, 12.0)]
    several = replace(
        report,
        sides={fi: report.sides[BF16], fa: second, INT2: report.sides[INT2]},
        bulk=Bulk(requests=64, context=1000, new_tokens=100, turns=2),
    )
    several.sides[fi].bulk, second.bulk, several.sides[INT2].bulk = (
        _bulk(60.0, 60.0),
        _bulk(70.0, 40.0),
        _bulk(50.0, 5.0),
    )
    assert (several.best("bf16", SMALL), several.best("bf16", LARGE)) == (fi, fa)
    assert several.best("bf16", LAST) is None and several.compared == ("bf16",)
    assert several.speedup(SMALL, "bf16") == pytest.approx(1.6)
    assert several.capacity_ratio("bf16") == pytest.approx(6.8), "the largest cache"
    assert several.job_speedup("bf16") == pytest.approx(2) and several.best_job("bf16") == fa
    assert several.turn_speedup(1, "bf16") == pytest.approx(8)
    facts = as_json(several)
    assert [side["baseline"] for side in facts["sides"]] == ["flashinfer", "fa3", None]
    assert [case["best"]["bf16"] for case in facts["speedup"]] == ["flashinfer", "fa3", None]
    assert facts["job"]["best"] == {"bf16": "fa3", "fp8": None}
    print_serve(several)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if "BF16 f" in line and "30,000" in line]
    assert lines[0][2:4] == ["BF16", "flashinfer"] and lines[1][2:5] == ["BF16", "fa3", "(best)"]
    assert "vs FP8" not in out and "1.60 x" in out


def _bulk(*seconds: float) -> BulkResult:
    return BulkResult(tuple(TurnResult(each, 0.5 * number) for number, each in enumerate(seconds)))


def talking(report: Report) -> Report:
    """The same report after a job of two turns."""
    for side, seconds in {BF16: (100.0, 90.0), FP8: (100.0, 50.0), INT2: (80.0, 10.0)}.items():
        report.sides[side].bulk = _bulk(*seconds)
    return replace(report, bulk=Bulk(requests=64, context=1000, new_tokens=100, turns=2))


def test_every_turn_of_a_job_is_told(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report = talking(report)
    facts = as_json(report)
    assert facts["job"]["int2_over_bf16"] == pytest.approx(190 / 90)
    assert [turn["int2_over_bf16"] for turn in facts["job"]["turn_ratios"]] == [
        pytest.approx(1.25),
        pytest.approx(9.0),
    ]
    assert facts["sides"][2]["job"]["turns"][1] == {"seconds": 10.0, "reused": 0.5}
    told = [
        (row["cache"], row["job_turn"], row["context"], row["job_s"], row["job_reused"])
        for row in rows_of(report)
        if row["job_turn"]
    ]
    assert told[4:] == [("int2", "1", "1000", "80.0", "0.0"), ("int2", "2", "1164", "10.0", "0.5")]
    print_serve(report)
    out = capsys.readouterr().out
    assert (
        "64 conversations of 2 turns, each of 1,000 and 100 tokens: BF16 190.0 s · FP8 150.0 s ·"
        " INT2 90.0 s (INT2 2.11 times BF16, 1.67 times FP8)" in out
    )
    assert "INT2 10.0 s, 50% reused (INT2 9.00 times BF16, 5.00 times FP8)" in out


def test_a_cpu_gives_no_ratio(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(talking(report), device="CPU")
    facts, none = as_json(report), {"int2_over_bf16": None, "int2_over_fp8": None}
    assert all(case.items() >= none.items() for case in facts["speedup"])
    assert facts["capacity_ratio"] == none and facts["job"]["turn_ratios"] == [none, none]
    assert facts["job"].items() >= none.items() and "plain PyTorch" in facts["not_compared"]
    print_serve(report)
    out = capsys.readouterr().out
    assert "vs BF16" not in out and "1.60 x" not in out and "times BF16" not in out
    assert "8.00 ms" in out and "No ratio  a CPU runs INT2 in plain PyTorch" in out


def test_a_job_that_a_side_refused_has_no_ratio(report: Report) -> None:
    assert as_json(report)["job"] is None
    report = talking(report)
    report.sides[INT2].bulk = BulkResult(refused="needs more")
    assert report.job_speedup("bf16") is None and "needs more" in as_csv(report)


def test_the_picture_is_a_png_with_and_without_gaps(report: Report) -> None:
    pytest.importorskip("matplotlib")
    for cases in ((SMALL,), (SMALL, LARGE, LAST)):
        assert speed_chart(replace(report, cases=cases)).startswith(b"\x89PNG\r\n")
    report.sides[INT2] = SideResult(error="did not start")
    assert speed_chart(report).startswith(b"\x89PNG\r\n")
    del report.sides[INT2], report.sides[FP8]
    assert speed_chart(report).startswith(b"\x89PNG\r\n")
