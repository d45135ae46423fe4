"""Following an engine process: what it says, how it ends, and that it is gone. Programs stand in
for the engine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.engines.sglang.offline_process import Bulk, Case, OfflineJob
from oscar_zoo.evaluate import bench
from oscar_zoo.evaluate.bench.run import BulkResult, SideResult, TurnResult, measure

ONE, TWO = Case(batch=1, context=10), Case(batch=2, context=10)
UP = {"up": 1.5, "sglang": "0.5.21", "capacity": 99, "engine": {"dtype": "float32"}}
FIRST = {"case": ONE.model_dump(), "arrivals": [[[0.1 * (i + 1), i + 1] for i in range(9)]]}
Run = Callable[..., SideResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(
        *news: dict[str, object],
        then: str = "",
        limit: float | None = None,
        seen: list[int] | None = None,
        bulk: bool = False,
        repeats: int = 1,
        into: SideResult | None = None,
    ) -> SideResult:
        work = Bulk(requests=3, context=10, new_tokens=9) if bulk else None
        job = OfflineJob(
            arguments=(),
            cases=(ONE, TWO),
            new_tokens=9,
            repeats=repeats,
            news=str(tmp_path / "news"),
            bulk=work,
        )
        lines = "".join(json.dumps(item) + "\n" for item in news)
        program = f"import os, sys, time, subprocess\n{then}"
        if limit is None:
            program = program.replace("\n", f"\nopen({job.news!r}, 'a').write({lines!r})\n", 1)
        plan = LaunchPlan((sys.executable, "-P", "-c", program), dict(os.environ), "")
        states = seen if seen is not None else []
        progress: Callable[[int, int, str], None] = lambda done, total, what: states.append(done)  # noqa: E731
        # A program may start slower than any limit that a test would wait for.
        Path(job.news).write_text("" if limit is None else lines)
        log = tmp_path / "log"
        return measure(plan, job, log, limit=limit or 300, progress=progress, into=into)

    return run


def test_everything_that_was_measured_is_kept(run: Run) -> None:
    seen: list[int] = []
    refused = {"case": TWO.model_dump(), "refused": "needs more"}
    result = run(
        UP, {"progress": 7}, FIRST, refused, {"done": True}, then="time.sleep(60)", seen=seen
    )
    assert result.error is None and (result.up_s, result.capacity, result.sglang) == (
        1.5,
        99,
        "0.5.21",
    )
    first, second = result.cases
    assert first.figures is not None and first.figures.ms_per_token == pytest.approx(100)
    assert (second.case, second.figures, second.refused) == (TWO, None, "needs more")
    assert result.of(TWO) is second and seen == [0, 7]


def repeat(case: Case, gap: float) -> dict[str, object]:
    arrivals = [[[gap * (i + 1), i + 1] for i in range(9)]] * case.batch
    return {"case": case.model_dump(), "arrivals": arrivals}


def test_every_repeat_counts_and_stays_when_a_later_one_fails(run: Run) -> None:
    news = UP, *(repeat(ONE, gap) for gap in (0.2, 0.1, 0.4)), repeat(TWO, 0.3)
    result = run(*news, then="raise MemoryError('out of memory.')", repeats=3)
    first, second = result.cases
    assert (len(first.repeats), len(second.repeats)) == (3, 1)
    assert first.figures is not None and first.figures.ms_per_token == pytest.approx(200)
    assert first.spread["ms_per_token"] == pytest.approx((100, 400))
    assert second.figures == second.repeats[0] and result.measured
    again = {"case": TWO.model_dump(), "refused": "not again"}
    ended = run(*news, again, {"done": True}, repeats=3).cases[1]
    assert (len(ended.repeats), ended.refused) == (1, "not again")


def test_the_log_or_the_process_itself_says_why_it_ended(run: Run) -> None:
    assert run(UP, {"error": "no such model"}, then="sys.exit(1)").error == "no such model"
    crashed = run(UP, FIRST, then="raise MemoryError('out of memory.')")
    assert [one.case for one in crashed.cases] == [ONE]
    assert crashed.error == "the engine ended: MemoryError: out of memory"


@pytest.mark.parametrize(
    ("news", "what"), [((), "the start"), ((UP,), "the case 1 x 10"), ((UP, FIRST), "the case 2")]
)
def test_the_limit_is_per_case_and_names_what_took_so_long(
    run: Run, news: tuple[object, ...], what: str
) -> None:
    result = run(*news, then="time.sleep(60)", limit=1)
    assert (
        result.error is not None
        and result.error.startswith(what)
        and result.error.endswith("took longer than 1 s")
    )


def test_the_job_after_the_cases_is_kept_and_named(run: Run, tmp_path: Path) -> None:
    cases = FIRST, {"case": TWO.model_dump(), "refused": "needs more"}
    turns = [{"seconds": 2.5, "reused": 0.0}, {"seconds": 0.5, "reused": 0.9}]
    done = run(UP, *cases, {"bulk": {"turns": turns}}, {"done": True}, bulk=True)
    assert done.error is None and done.bulk == BulkResult(
        (TurnResult(2.5, 0.0), TurnResult(0.5, 0.9))
    )
    assert done.bulk.seconds == 3.0
    late = run(UP, *cases, then="time.sleep(60)", limit=1, bulk=True)
    assert late.error == "the job took longer than 1 s" and late.bulk is None


def test_a_signal_between_reading_and_keeping_loses_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = bench.run._take

    def interrupted(item: dict[str, object], result: SideResult) -> bool:
        if "case" in item:
            os.kill(os.getpid(), signal.SIGINT)
        return take(item, result)

    kept = SideResult()
    monkeypatch.setattr(bench.run, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(UP, FIRST, then="time.sleep(60)", into=kept)
    assert [one.case for one in kept.cases] == [ONE]


def test_a_signal_keeps_what_was_measured(run: Run) -> None:
    """Also what the engine said after it was last looked at."""
    for number, error in ((signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)):
        kept = SideResult()
        then = f"os.kill(os.getppid(), {int(number)}); time.sleep(60)"
        with pytest.raises(error):
            run(UP, FIRST, then=then, into=kept)
        assert kept.measured and [one.case for one in kept.cases] == [ONE]
        assert kept.error == "the case 2 x 10 was interrupted"
    with pytest.raises(KeyboardInterrupt):
        run(UP, then=then, into=(none := SideResult()))
    assert not none.measured


def test_half_a_line_is_not_read_yet(run: Run, tmp_path: Path) -> None:
    then = (
        f"out = open({str(tmp_path / 'news')!r}, 'a')\nout.write('{{\"do'); out.flush();"
        " time.sleep(0.5)\nout.write('ne\": true}\\n'); out.flush(); time.sleep(60)"
    )
    assert run(UP, then=then).error is None
