"""The comparison as JSON, CSV and PNG, from results with every kind of gap."""

from __future__ import annotations

import csv
import io
import json

import pytest

from oscar_zoo.bench.chart import render_png
from oscar_zoo.bench.report import COLUMNS, Report
from oscar_zoo.bench.run import BulkResult, CaseResult, SideResult, TurnResult
from oscar_zoo.bench.timing import Figures
from oscar_zoo.cli.render.bench import print_report
from oscar_zoo.engines.sglang.offline_job import Bulk, Case

SMALL, LARGE, LAST = (
    Case(batch=1, context=8000),
    Case(batch=16, context=30000),
    Case(batch=64, context=30000),
)


@pytest.fixture
def report() -> Report:
    bf16 = SideResult(10.0, 720_000, "0.5.21", {"attention_backend": "flashinfer"})
    bf16.cases = [
        CaseResult(SMALL, Figures(0.5, 0.5, 8.0, 125.0)),
        CaseResult(LARGE, Figures(9.0, 5.0, 20.0, 800.0)),
        CaseResult(LAST, refused="needs 1,926,144 tokens, the cache has 720,000"),
    ]
    int2 = SideResult(
        12.0, 4_896_000, "0.5.21", {"attention_backend": "oscar_int2"}, error="the engine ended"
    )
    int2.cases = [
        CaseResult(SMALL, Figures(0.6, 0.6, 5.0, 200.0)),
        CaseResult(LARGE, Figures(9.5, 5.2, None, None)),
    ]
    cases = (SMALL, LARGE, LAST)
    return Report(
        "m", True, ("Hadamard", "sha256:0"), "H200", 96, cases, {"bf16": bf16, "int2": int2}
    )


def test_speedups_and_capacity_compare_the_two_sides(report: Report) -> None:
    assert report.speedup(SMALL) == pytest.approx(1.6)
    assert report.speedup(LARGE) is None and report.speedup(LAST) is None
    assert report.capacity_ratio == pytest.approx(6.8)
    assert report.errors == {"int2": "the engine ended"}


def test_a_gap_has_its_reason(report: Report) -> None:
    assert report.note("bf16", LARGE) is None
    assert report.note("bf16", LAST) == "needs 1,926,144 tokens, the cache has 720,000"
    assert report.note("int2", LAST) == "not measured"


def test_json_holds_everything_and_is_plain(report: Report) -> None:
    facts = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert facts["schema"] == "oscar-zoo.bench-serve/1" and facts["weights"] == "random"
    assert facts["sides"]["int2"]["error"] == "the engine ended"
    assert [case["ms_per_token"] for case in facts["sides"]["bf16"]["cases"]] == [8.0, 20.0, None]
    assert facts["speedup"][0] == {
        "batch": 1,
        "context": 8000,
        "int2_over_bf16": pytest.approx(1.6),
    }


def test_csv_has_one_row_per_side_and_case(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["cache"], row["batch"]) for row in rows] == [
        (c, b) for c in ("bf16", "int2") for b in ("1", "16", "64")
    ]
    assert (
        rows[1]["ms_per_token"] == "20.0"
        and rows[1]["capacity_tokens"] == "720000"
        and rows[1]["note"] == ""
    )
    assert rows[4]["ms_per_token"] == "" and rows[4]["ttft_s"] == "9.5"
    assert rows[5]["note"] == "not measured"


def test_a_job_has_a_line_of_its_own(report: Report) -> None:
    assert report.to_json()["job"] is None
    object.__setattr__(report, "bulk", Bulk(requests=64, context=30_000, new_tokens=512))
    assert report.job_speedup is None
    report.sides["bf16"].bulk, report.sides["int2"].bulk = _bulk(300.0), _bulk(100.0)
    job = report.to_json()["job"]
    ratios = {"int2_over_bf16": pytest.approx(3.0), "turns_int2_over_bf16": [pytest.approx(3.0)]}
    assert job == {"requests": 64, "context": 30_000, "new_tokens": 512, "turns": 1, **ratios}
    rows = [row for row in csv.DictReader(io.StringIO(report.to_csv())) if row["job_s"]]
    assert [(row["cache"], row["batch"], row["job_s"]) for row in rows] == [
        ("bf16", "64", "300.0"),
        ("int2", "64", "100.0"),
    ]
    assert float(rows[1]["tokens_per_second"]) == pytest.approx(64 * 512 / 100)
    report.sides["int2"].bulk = BulkResult(refused="needs more")
    assert report.job_speedup is None and "needs more" in report.to_csv()


def _bulk(*seconds: float) -> BulkResult:
    return BulkResult(tuple(TurnResult(each, 0.5 * number) for number, each in enumerate(seconds)))


def test_every_turn_of_a_job_is_told(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    object.__setattr__(report, "bulk", Bulk(requests=64, context=1000, new_tokens=100, turns=2))
    report.sides["bf16"].bulk, report.sides["int2"].bulk = _bulk(100.0, 90.0), _bulk(80.0, 10.0)
    job = report.to_json()["job"]
    assert job["int2_over_bf16"] == pytest.approx(190 / 90)
    assert job["turns_int2_over_bf16"] == [pytest.approx(1.25), pytest.approx(9.0)]
    assert report.to_json()["sides"]["int2"]["job"]["turns"][1] == {"seconds": 10.0, "reused": 0.5}
    rows = [row for row in csv.DictReader(io.StringIO(report.to_csv())) if row["job_turn"]]
    told = [
        (row["cache"], row["job_turn"], row["context"], row["job_s"], row["job_reused"])
        for row in rows
    ]
    assert told[2:] == [("int2", "1", "1000", "80.0", "0.0"), ("int2", "2", "1164", "10.0", "0.5")]
    print_report(report)
    out = capsys.readouterr().out
    assert (
        "64 conversations of 2 turns, each of 1,000 and 100 tokens: BF16 190.0 s · INT2 90.0 s"
        " (2.11 times)" in out
    )
    assert "Turn 2   BF16 90.0 s, 50% reused · INT2 10.0 s, 50% reused (9.00 times)" in out


def test_a_cpu_gives_no_ratio(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    object.__setattr__(report, "device", "CPU")
    object.__setattr__(report, "bulk", Bulk(requests=64, context=1000, new_tokens=100, turns=2))
    report.sides["bf16"].bulk, report.sides["int2"].bulk = _bulk(100.0, 90.0), _bulk(80.0, 10.0)
    facts = report.to_json()
    assert {case["int2_over_bf16"] for case in facts["speedup"]} == {None}
    assert facts["capacity_ratio"] is None and facts["job"]["int2_over_bf16"] is None
    assert facts["job"]["turns_int2_over_bf16"] == [None, None]
    assert "plain PyTorch" in facts["not_compared"]
    print_report(report)
    out = capsys.readouterr().out
    assert "vs BF16" not in out and "1.60 x" not in out and "times)" not in out
    assert "8.00 ms" in out and "No ratio  a CPU runs INT2 in plain PyTorch" in out


def test_one_side_alone_is_a_report_too(report: Report) -> None:
    del report.sides["bf16"]
    assert report.capacity_ratio is None and report.speedup(SMALL) is None
    assert report.note("bf16", SMALL) == "not measured"
    assert len(list(csv.DictReader(io.StringIO(report.to_csv())))) == 3


def test_the_picture_is_a_png_with_and_without_gaps(report: Report) -> None:
    pytest.importorskip("matplotlib")
    for cases in ((SMALL,), (SMALL, LARGE, LAST)):
        object.__setattr__(report, "cases", cases)
        assert render_png(report).startswith(b"\x89PNG\r\n")
    report.sides["int2"] = SideResult(error="did not start")
    assert render_png(report).startswith(b"\x89PNG\r\n")
