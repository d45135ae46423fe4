"""Following an engine process: what it says, how it ends, and that it is gone, with programs in
place of the engine; and the figures of a batch from hand-made arrival times."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.engines.sglang.offline_process import Bulk, Case, OfflineJob
from oscar_zoo.evaluate.bench import sides
from oscar_zoo.evaluate.bench.report import CaseResult, JobResult, Side, Turn
from oscar_zoo.evaluate.bench.sides import figures, measure

ONE, TWO = Case(batch=1, context=10), Case(batch=2, context=10)
UP = {"up": 1.5, "sglang": "0.5.21", "capacity": 99, "engine": {"dtype": "float32"}}
FIRST = {"case": ONE.model_dump(), "arrivals": [[[0.1 * (i + 1), i + 1] for i in range(9)]]}
REFUSED = {"case": TWO.model_dump(), "refused": "needs more"}
Run = Callable[..., Side]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(
        *news: dict[str, object],
        then: str = "",
        limit: float | None = None,
        bulk: bool = False,
        repeats: int = 1,
        into: Side | None = None,
        seen: list[int] | None = None,
    ) -> Side:
        job = OfflineJob(
            arguments=(),
            cases=(ONE, TWO),
            new_tokens=9,
            repeats=repeats,
            news=str(tmp_path / "news"),
            bulk=Bulk(requests=3, context=10, new_tokens=9) if bulk else None,
        )
        lines = "".join(json.dumps(item) + "\n" for item in news)
        program = f"import os, sys, time, subprocess\n{then}"
        if limit is None:
            program = program.replace("\n", f"\nopen({job.news!r}, 'a').write({lines!r})\n", 1)
        plan = LaunchPlan((sys.executable, "-P", "-c", program), dict(os.environ), "")
        # A program may start slower than any limit that a test would wait for.
        Path(job.news).write_text("" if limit is None else lines)
        side, told = into or Side("int2"), [] if seen is None else seen

        def progress(done: int, total: int, what: str) -> None:
            told.append(done)

        measure(plan, job, tmp_path / "log", side, limit=limit or 300, progress=progress)
        return side

    return run


def test_everything_is_kept_and_a_lost_engine_ends_only_its_side(run: Run) -> None:
    seen: list[int] = []
    side = run(UP, {"progress": 7}, FIRST, REFUSED, {"done": True}, seen=seen)
    assert (side.error, side.start_s, side.capacity, side.sglang) == (None, 1.5, 99, "0.5.21")
    first, second = side.cases
    assert first.ms_per_token == pytest.approx(100) and seen == [0, 7]
    assert (second.case, second.ttft_s, second.note) == (TWO, None, "needs more")


def repeat(case: Case, gap: float) -> dict[str, object]:
    arrivals = [[[gap * (i + 1), i + 1] for i in range(9)]] * case.batch
    return {"case": case.model_dump(), "arrivals": arrivals}


def test_every_repeat_counts_and_stays_when_a_later_one_fails(run: Run) -> None:
    news = UP, *(repeat(ONE, gap) for gap in (0.2, 0.1, 0.4)), repeat(TWO, 0.3)
    result = run(*news, then="raise MemoryError('out of memory.')", repeats=3)
    first, second = result.cases
    assert (first.repeats, second.repeats, first.note) == (3, 1, None) and result.measured
    assert first.ms_per_token == pytest.approx(200)
    assert first.spread["ms_per_token"] == pytest.approx((100, 400))
    assert (second.ttft_s, second.note) == (pytest.approx(0.3), "measured 1 of 3 times")
    ended = run(*news, REFUSED, {"done": True}, repeats=3).cases[1]
    assert (ended.repeats, ended.note) == (1, "needs more")


def test_the_log_or_the_process_itself_says_why_it_ended(run: Run) -> None:
    assert run(UP, {"error": "no such model"}, then="sys.exit(1)").error == "no such model"
    crashed = run(UP, FIRST, then="raise MemoryError('out of memory.')")
    assert [one.case for one in crashed.cases] == [ONE]
    assert crashed.error == "the engine ended: MemoryError: out of memory"


@pytest.mark.parametrize(
    ("news", "what"), [((), "the start"), ((UP,), "the case 1 x 10"), ((UP, FIRST), "the case 2")]
)
def test_a_case_has_a_limit_that_is_named(run: Run, news: tuple[object, ...], what: str) -> None:
    error = str(run(*news, then="time.sleep(60)", limit=1).error)
    assert error.startswith(what) and error.endswith("took longer than 1 s")


def test_the_job_after_the_cases_is_kept_and_named(run: Run) -> None:
    turns = [{"seconds": 2.5, "reused": 0.0}, {"seconds": 0.5, "reused": 0.9}]
    done = run(UP, FIRST, REFUSED, {"bulk": {"turns": turns}}, {"done": True}, bulk=True)
    assert done.error is None and done.job == JobResult((Turn(2.5, 0.0), Turn(0.5, 0.9)))
    assert done.time() == 3.0
    late = run(UP, FIRST, REFUSED, then="time.sleep(60)", limit=1, bulk=True)
    assert late.error == "the job took longer than 1 s" and late.job is None


def test_a_signal_before_keeping_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    take = sides._take

    def interrupted(item: dict[str, object], side: Side, job: OfflineJob) -> bool:
        if "case" in item:
            os.kill(os.getpid(), signal.SIGINT)
        return take(item, side, job)

    kept = Side("int2")
    monkeypatch.setattr(sides, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(UP, FIRST, then="time.sleep(60)", into=kept)
    assert [one.case for one in kept.cases] == [ONE]


def test_a_signal_keeps_what_was_measured(run: Run) -> None:
    """Also what the engine said after it was last looked at."""
    for number, error in ((signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)):
        kept = Side("int2")
        then = f"os.kill(os.getppid(), {int(number)}); time.sleep(60)"
        with pytest.raises(error):
            run(UP, FIRST, then=then, into=kept)
        assert kept.measured and [one.case for one in kept.cases] == [ONE]
        assert kept.error == "the case 2 x 10 was interrupted"
    with pytest.raises(KeyboardInterrupt):
        run(UP, then=then, into=(none := Side("int2")))
    assert not none.measured


def test_half_a_line_is_not_read_yet(run: Run, tmp_path: Path) -> None:
    then = (
        f"out = open({str(tmp_path / 'news')!r}, 'a')\nout.write('{{\"do'); out.flush();"
        " time.sleep(0.5)\nout.write('ne\": true}\\n'); out.flush(); time.sleep(60)"
    )
    assert run(UP, then=then).error is None


def steady(start: float, gap: float, count: int) -> list[tuple[float, int]]:
    return [(start + gap * i, i + 1) for i in range(count)]


@given(
    starts=st.lists(st.floats(0.01, 0.1), min_size=1, max_size=5),
    gap=st.floats(1e-3, 1e-1),
    count=st.integers(200, 240),
)
def test_even_tokens_give_their_spacing(starts: list[float], gap: float, count: int) -> None:
    found = figures([steady(start, gap, count) for start in starts])
    assert found["ttft_s"] == max(starts)
    assert found["ms_per_token"] == pytest.approx(1000 * gap)
    assert found["tokens_per_second"] == pytest.approx(len(starts) / gap)


def test_the_first_quarter_does_not_count() -> None:
    slow = [(1.0 + 0.5 * i, i + 1) for i in range(24)]
    fast = [(slow[-1][0] + 0.01 * (i + 1), 25 + i) for i in range(73)]
    found = figures([slow + fast])
    assert found["ms_per_token"] == pytest.approx(10)
    assert found["tokens_per_second"] == pytest.approx(100)


def test_tokens_that_arrive_together_share_their_time_and_a_late_one_moves_only_the_rate() -> None:
    together = [(0.04 * i, 1 + 4 * i) for i in range(40)]
    late = [(t + (1.0 if n > 140 else 0.0), n) for t, n in together]
    found, slower = figures([together]), figures([late])
    assert found["ms_per_token"] == slower["ms_per_token"] == pytest.approx(10)
    assert slower["tokens_per_second"] < found["tokens_per_second"]  # type: ignore[operator]


def test_only_the_time_when_all_requests_run_counts() -> None:
    early = steady(0.1, 0.002, 400)  # fast while it is alone, until 0.9 s
    late = steady(0.5, 0.010, 400)
    found = figures([early, late])
    assert (found["ttft_s"], found["ttft_median_s"]) == (0.5, pytest.approx(0.3))
    assert found["tokens_per_second"] == pytest.approx(500 + 100, rel=0.01)


def test_too_few_tokens_give_no_figure_instead_of_a_guess() -> None:
    for requests in ([[(0.2, 1)]], [steady(0.1, 0.01, 8), steady(0.9, 0.01, 8)]):
        found = figures(requests)
        assert found["ttft_s"] == max(one[0][0] for one in requests)
        assert found["ms_per_token"] is None and found["tokens_per_second"] is None


def test_several_repeats_give_medians_and_their_ends_figure_by_figure() -> None:
    """A repeat with too few tokens for one figure still counts for the others."""
    result = CaseResult(1, 10, 3)
    for first, median, token in ((3.0, 1.0, 8.0), (1.0, 3.0, None), (2.0, 2.0, 4.0)):
        figures = {"ttft_s": first, "ttft_median_s": median}
        result.add({**figures, "ms_per_token": token, "tokens_per_second": None})  # type: ignore[dict-item]
    medians = (result.ttft_s, result.ttft_median_s, result.ms_per_token)
    assert (*medians, result.tokens_per_second) == (2.0, 2.0, 6.0, None)
    ends = {"ttft_s": (1.0, 3.0), "ttft_median_s": (1.0, 3.0), "ms_per_token": (4.0, 8.0)}
    assert result.spread == ends | {"tokens_per_second": None}
