"""The comparison as JSON, CSV, table and PNG, from results with every kind of gap."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from oscar_zoo.bench.chart import render_png
from oscar_zoo.bench.records import COLUMNS, as_csv, as_json
from oscar_zoo.bench.report import INT2, Report
from oscar_zoo.bench.run import BulkResult, CaseResult, SideResult, TurnResult
from oscar_zoo.bench.sides import CACHES, Side, all_sides
from oscar_zoo.bench.timing import Figures
from oscar_zoo.cli.render.bench import print_report
from oscar_zoo.engines.sglang.offline_job import Bulk, Case

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
    int2.cases = [
        steps(SMALL, 5.0, 5.0, 5.0),
        CaseResult(LARGE, (Figures(9.5, 5.2, None, None),)),
    ]
    cases, sides = (SMALL, LARGE, LAST), {BF16: bf16, FP8: fp8, INT2: int2}
    return Report("m", True, ("Hadamard", "sha256:0"), "H200", 96, cases, sides, repeats=3)


def rows_of(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(report))))


def test_int2_is_compared_with_every_stock_cache(report: Report) -> None:
    assert report.speedup(SMALL, "bf16") == pytest.approx(1.6)
    assert report.speedup(SMALL, "fp8") == pytest.approx(1.2)
    assert report.speedup(LARGE, "bf16") is None and report.speedup(LAST, "fp8") is None
    assert report.capacity_ratio("bf16") == pytest.approx(6.8)
    assert report.capacity_ratio("fp8") == pytest.approx(3.4)
    assert report.errors == {INT2: "the engine ended"}


def test_a_gap_has_its_reason(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.note(BF16, LARGE) is None
    assert report.note(BF16, LAST) == "needs 1,926,144 tokens, the cache has 720,000"
    assert report.note(INT2, LAST) == "not measured"
    assert report.note(FP8, LAST) == "measured 1 of 3 times"
    print_report(report)
    out = capsys.readouterr().out
    assert "FP8 64 x 30,000: measured 1 of 3 times" in out and "INT2 64 x 30,000" not in out


def test_json_holds_everything_and_is_plain(report: Report) -> None:
    facts = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert facts["schema"] == "oscar-zoo.bench-serve/2" and facts["weights"] == "random"
    bf16, _, int2 = facts["sides"]
    assert (int2["cache"], int2["baseline"], int2["error"]) == ("int2", None, "the engine ended")
    assert (bf16["cache"], bf16["baseline"], facts["repeats"]) == ("bf16", "flashinfer", 3)
    assert [case["ms_per_token"] for case in bf16["cases"]] == [8.0, 20.0, None]
    assert [case["repeats"] for case in bf16["cases"]] == [3, 3, 0]
    assert bf16["cases"][0]["spread"]["ms_per_token"] == [7.8, 8.8]
    assert bf16["cases"][2]["spread"]["ms_per_token"] is None
    assert facts["speedup"][0] == {
        "batch": 1,
        "context": 8000,
        "int2_over_bf16": pytest.approx(1.6),
        "int2_over_fp8": pytest.approx(1.2),
        "best": {"bf16": "flashinfer", "fp8": "flashinfer"},
    }


def test_csv_has_one_row_per_side_and_case(report: Report) -> None:
    rows = rows_of(report)
    assert tuple(rows[0]) == COLUMNS
    assert [(row["cache"], row["batch"]) for row in rows] == [
        (c, b) for c in CACHES for b in ("1", "16", "64")
    ]
    first = {name: rows[0][name] for name in ("ms_per_token", "ms_per_token_min", "repeats")}
    assert first == {"ms_per_token": "8.0", "ms_per_token_min": "7.8", "repeats": "3"}
    assert rows[0]["ms_per_token_max"] == "8.8" and rows[0]["int2_over_bf16"] == ""
    assert rows[1]["capacity_tokens"] == "720000" and rows[1]["note"] == ""
    assert [float(rows[6][f"int2_over_{cache}"]) for cache in ("bf16", "fp8")] == [
        pytest.approx(1.6),
        pytest.approx(1.2),
    ]
    assert float(rows[6]["capacity_int2_over_fp8"]) == pytest.approx(3.4)
    assert rows[7]["ms_per_token"] == "" and rows[7]["ttft_s"] == "9.5"
    assert rows[8]["note"] == "not measured"


def test_the_table_has_medians_and_how_far_repeats_were_from_them(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report)
    out = capsys.readouterr().out
    assert "8.00 ms ±10 %" in out and "15.00 ms" not in out and "16.00 ms ±6.2 %" in out
    assert "vs BF16  vs FP8" in out and "1.60 x  1.20 x" in " ".join(out.split(" "))
    assert "(INT2 6.8 times BF16, 3.4 times FP8)" in out
    for side in report.sides.values():
        side.cases = [replace(case, repeats=case.repeats[:1]) for case in side.cases]
    print_report(replace(report, repeats=1))
    assert "±" not in capsys.readouterr().out


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
    print_report(several)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if "BF16 f" in line and "30,000" in line]
    assert lines[0][2:4] == ["BF16", "flashinfer"] and lines[1][2:5] == ["BF16", "fa3", "(best)"]
    assert "vs FP8" not in out and "1.60 x" in out


def test_a_job_has_a_line_of_its_own(report: Report) -> None:
    assert as_json(report)["job"] is None
    report = replace(report, bulk=Bulk(requests=64, context=30_000, new_tokens=512))
    assert report.job_speedup("bf16") is None
    report.sides[BF16].bulk, report.sides[INT2].bulk = _bulk(300.0), _bulk(100.0)
    ratios = {"int2_over_bf16": pytest.approx(3.0), "int2_over_fp8": None}
    assert as_json(report)["job"] == {
        "requests": 64,
        "context": 30_000,
        "new_tokens": 512,
        "turns": 1,
        **ratios,
        "best": {"bf16": "flashinfer", "fp8": None},
        "turn_ratios": [ratios],
    }
    rows = [row for row in rows_of(report) if row["job_s"]]
    assert [(row["cache"], row["batch"], row["job_s"]) for row in rows] == [
        ("bf16", "64", "300.0"),
        ("int2", "64", "100.0"),
    ]
    assert float(rows[1]["tokens_per_second"]) == pytest.approx(64 * 512 / 100)
    assert float(rows[1]["int2_over_bf16"]) == pytest.approx(3)
    report.sides[INT2].bulk = BulkResult(refused="needs more")
    assert report.job_speedup("bf16") is None and "needs more" in as_csv(report)


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
    print_report(report)
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
    print_report(report)
    out = capsys.readouterr().out
    assert "vs BF16" not in out and "1.60 x" not in out and "times BF16" not in out
    assert "8.00 ms" in out and "No ratio  a CPU runs INT2 in plain PyTorch" in out


def test_one_side_alone_is_a_report_too(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    for gone in (BF16, FP8):
        del report.sides[gone]
    assert report.capacity_ratio("bf16") is None and report.speedup(SMALL, "bf16") is None
    assert report.note(BF16, SMALL) == "not measured"
    assert len(rows_of(report)) == 3
    print_report(report)
    out = capsys.readouterr().out
    assert "vs " not in out and "times BF16" not in out and "No ratio" not in out


def test_the_picture_is_a_png_with_and_without_gaps(report: Report) -> None:
    pytest.importorskip("matplotlib")
    for cases in ((SMALL,), (SMALL, LARGE, LAST)):
        assert render_png(replace(report, cases=cases)).startswith(b"\x89PNG\r\n")
    report.sides[INT2] = SideResult(error="did not start")
    assert render_png(report).startswith(b"\x89PNG\r\n")
    del report.sides[INT2], report.sides[FP8]
    assert render_png(report).startswith(b"\x89PNG\r\n")
