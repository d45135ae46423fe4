"""The comparison as JSON, CSV, table and PNG, from results with every kind of gap."""

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from cli_output import check

from oscar_zoo.cli.render.bench import print_serve
from oscar_zoo.engines.sglang.offline_process import Bulk, Case
from oscar_zoo.evaluate.bench.report import (
    CACHES,
    COLUMNS,
    CaseResult,
    JobResult,
    MeasuredArtifact,
    Report,
    Side,
    Turn,
    as_csv,
)
from oscar_zoo.evaluate.charts import speed_chart
from oscar_zoo.verb import as_json

SMALL, LARGE, LAST = CASES = tuple(
    Case(batch=batch, context=context) for batch, context in ((1, 8000), (16, 30000), (64, 30000))
)
TALK = Bulk(requests=64, context=1000, new_tokens=100, turns=2)


def steps(case: Case, *milliseconds: float | None) -> CaseResult:
    """A case with a repeat for each time of a decode step."""
    result = CaseResult(case.batch, case.context, wanted=3)
    for ms in milliseconds:
        rate = None if ms is None else 1000 / ms
        result.add(
            {"ttft_s": 0.5, "ttft_median_s": 0.4, "ms_per_token": ms, "tokens_per_second": rate}
        )
    return result


def side(cache: Any, backend: str | None, capacity: int, *cases: CaseResult, **more: Any) -> Side:
    engine = {"attention_backend": backend or "oscar_int2"}
    made = Side(cache, backend, sglang="0.5.21", engine=engine, start_s=10.0, capacity=capacity)
    made.cases = [*cases]
    return replace(made, **more)


def job(*seconds: float) -> JobResult:
    return JobResult(tuple(Turn(each, 0.5 * number) for number, each in enumerate(seconds)))


@pytest.fixture
def report() -> Report:
    refused = steps(LAST)
    refused.refuse("needs 1,926,144 tokens, the cache has 720,000")
    bf16 = side(
        "bf16",
        "flashinfer",
        720_000,
        steps(SMALL, 8.0, 8.8, 7.8),
        steps(LARGE, *3 * [20.0]),
        refused,
    )
    fp8_cases = steps(SMALL, 6.0, 6.0, 6.5), steps(LARGE, 16.0, 15.0, 16.0), steps(LAST, 60.0)
    fp8 = side("fp8", "flashinfer", 1_440_000, *fp8_cases)
    int2_cases = steps(SMALL, 5.0, 5.0, 5.0), steps(LARGE, None)
    int2 = side("int2", None, 4_896_000, *int2_cases, error="the engine ended")
    artifact = MeasuredArtifact("Hadamard", "sha256:0")
    return Report("m", "random", artifact, "H200", 96, CASES, [bf16, fp8, int2], repeats=3)


def talking(report: Report) -> Report:
    """The same report after a job of two turns."""
    for one, seconds in zip(
        report.sides, ((100.0, 90.0), (100.0, 50.0), (80.0, 10.0)), strict=True
    ):
        one.job = job(*seconds)
    return replace(report, bulk=TALK)


def facts_of(report: Report) -> dict[str, Any]:
    facts = as_json(report)
    check(facts)
    return facts


def rows_of(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(report))))


def test_json_csv_and_table_agree(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(report)
    assert (facts["schema"], facts["weights"]) == ("oscar-zoo.bench-serve/2", "random")
    bf16, _, int2 = facts["sides"]
    assert (int2["cache"], int2["baseline"], int2["error"]) == ("int2", None, "the engine ended")
    assert [case["ms_per_token"] for case in bf16["cases"]] == [8.0, 20.0, None]
    assert [case["spread"]["ms_per_token"] for case in bf16["cases"]][::2] == [[7.8, 8.8], None]
    ratios = {"int2_over_bf16": pytest.approx(1.6), "int2_over_fp8": pytest.approx(1.2)}
    best = {"bf16": "flashinfer", "fp8": "flashinfer"}
    assert facts["speedup"][0] == {"batch": 1, "context": 8000, **ratios, "best": best}
    assert report.speedup("bf16", LARGE) is None and report.speedup("fp8", LAST) is None
    assert facts["capacity_ratio"]["int2_over_fp8"] == pytest.approx(3.4) and facts["job"] is None
    rows = rows_of(report)
    assert tuple(rows[0]) == COLUMNS and [row["cache"] for row in rows[::3]] == [*CACHES]
    assert (rows[0]["ms_per_token"], rows[0]["ms_per_token_min"]) == ("8.0", "7.8")
    assert {name: float(rows[6][name]) for name in ratios} == ratios
    assert [rows[n]["note"] for n in (0, 2, 5, 8)] == [
        "",
        "needs 1,926,144 tokens, the cache has 720,000",
        "measured 1 of 3 times",
        "not measured",
    ]
    print_serve(report)
    out = capsys.readouterr().out
    assert "8.00 ms ±10 %" in out and "1.60 x" in out and "(INT2 6.8 times BF16" in out
    assert "FP8 64 x 30,000: measured 1 of 3 times" in out and "INT2 64 x 30,000" not in out
    assert report.exit_code == 1 and replace(report, stopped="SIGINT").exit_code == 130


def test_int2_is_compared_with_the_best(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    bf16, _, int2 = report.sides
    fi = replace(bf16, alone=False, job=job(60.0, 60.0))
    cases = steps(SMALL, 9.0), steps(LARGE, 12.0)
    fa = side("bf16", "fa3", 700_000, *cases, alone=False, job=job(70.0, 40.0))
    sides = [fi, fa, replace(int2, job=job(50.0, 5.0))]
    several = replace(report, sides=sides, bulk=TALK)
    assert several.compared == ("bf16",) and several.speedup("bf16", SMALL) == pytest.approx(1.6)
    assert several.capacity_ratio("bf16") == pytest.approx(6.8), "the largest cache"
    assert several.speedup("bf16") == pytest.approx(2)
    assert several.speedup("bf16", turn=1) == pytest.approx(8)
    facts = facts_of(several)
    assert [one["baseline"] for one in facts["sides"]] == ["flashinfer", "fa3", None]
    assert [case["best"]["bf16"] for case in facts["speedup"]] == ["flashinfer", "fa3", None]
    assert facts["job"]["best"] == {"bf16": "fa3", "fp8": None}
    print_serve(several)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if "BF16 f" in line and "30,000" in line]
    assert lines[0][2:4] == ["BF16", "flashinfer"] and lines[1][2:5] == ["BF16", "fa3", "(best)"]
    assert "vs FP8" not in out and "1.60 x" in out


def test_every_turn_of_a_job_is_told(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report = talking(report)
    facts = facts_of(report)
    assert facts["job"]["int2_over_bf16"] == pytest.approx(190 / 90)
    turns = [turn["int2_over_bf16"] for turn in facts["job"]["turn_ratios"]]
    assert turns == pytest.approx([1.25, 9.0])
    assert facts["sides"][2]["job"]["turns"][1] == {"seconds": 10.0, "reused": 0.5}
    names = ("cache", "job_turn", "context", "job_s", "job_reused")
    told = [tuple(row[name] for name in names) for row in rows_of(report) if row["job_turn"]]
    assert told[4:] == [("int2", "1", "1000", "80.0", "0.0"), ("int2", "2", "1164", "10.0", "0.5")]
    print_serve(report)
    out = capsys.readouterr().out
    assert "64 conversations of 2 turns, each of 1,000 and 100 tokens: BF16 190.0 s" in out
    assert "FP8 150.0 s · INT2 90.0 s (INT2 2.11 times BF16, 1.67 times FP8)" in out
    assert "INT2 10.0 s, 50% reused (INT2 9.00 times BF16, 5.00 times FP8)" in out
    report.sides[2].job = JobResult(refused="needs more")
    assert report.speedup("bf16") is None and "needs more" in as_csv(report)


def test_a_cpu_gives_no_ratio(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(talking(report), device="CPU")
    facts, none = facts_of(report), {"int2_over_bf16": None, "int2_over_fp8": None}
    assert all(case.items() >= none.items() for case in facts["speedup"])
    assert facts["capacity_ratio"] == none and facts["job"]["turn_ratios"] == [none, none]
    assert facts["job"].items() >= none.items() and "plain PyTorch" in facts["not_compared"]
    print_serve(report)
    out = capsys.readouterr().out
    assert "vs BF16" not in out and "1.60 x" not in out and "times BF16" not in out
    assert "8.00 ms" in out and "No ratio  a CPU runs INT2 in plain PyTorch" in out


def test_the_picture_is_a_png_with_and_without_gaps(report: Report) -> None:
    pytest.importorskip("matplotlib")
    for cases in ((SMALL,), CASES):
        assert speed_chart(replace(report, cases=cases)).startswith(b"\x89PNG\r\n")
    for sides in ([*report.sides[:2], Side("int2", error="did not start")], report.sides[:1]):
        assert speed_chart(replace(report, sides=sides)).startswith(b"\x89PNG\r\n")
