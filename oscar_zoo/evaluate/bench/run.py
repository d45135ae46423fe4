"""One side of a comparison: start its engine, read its news, and keep what was measured.

A side that fails keeps every repeat it measured and says in one line why it ended. `server.running`
handles signals, the process group and a parent that is killed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.engines.sglang.offline_process import Case, OfflineJob
from oscar_zoo.errors import FlagRefused, ServerFailed

POLL_SECONDS = 0.1
Progress = Callable[[int, int, str], None]
"""Called with the tokens done, the tokens in all and what is done; a total of 0 means unknown."""


@dataclass(frozen=True)
class CaseResult:
    """The result of one case: one entry of `repeats` for each time it was measured, and `refused`
    with the reason when this engine cannot run it, or not again."""

    case: Case
    repeats: tuple[Figures, ...] = ()
    refused: str | None = None

    @property
    def figures(self) -> Figures | None:
        """The medians over the repeats, or `None` without any."""
        return medians(self.repeats) if self.repeats else None

    @property
    def spread(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest value of each figure, by its name."""
        return spread(self.repeats)

    def with_repeat(self, figures: Figures) -> CaseResult:
        """This result and one more repeat."""
        return replace(self, repeats=(*self.repeats, figures))


@dataclass(frozen=True)
class TurnResult:
    """One turn of the bulk: its seconds, and the share of its prompts from the prefix cache."""

    seconds: float
    reused: float


@dataclass(frozen=True)
class BulkResult:
    """The result of the bulk: all of its `turns`, or `refused` with the reason."""

    turns: tuple[TurnResult, ...] = ()
    refused: str | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds of all turns, or `None` when the bulk was refused."""
        return sum(turn.seconds for turn in self.turns) if self.turns else None


@dataclass
class SideResult:
    """The result of one side; without `error`, which says in one line why it ended early, it holds
    every case of the job, and else the last one may lack repeats. `up_s` are seconds until the
    engine was ready, and `capacity` the tokens of its cache, as it reports."""

    up_s: float | None = None
    capacity: int | None = None
    sglang: str | None = None
    engine: dict[str, str] = field(default_factory=dict)
    cases: list[CaseResult] = field(default_factory=list)
    bulk: BulkResult | None = None
    error: str | None = None

    @property
    def measured(self) -> bool:
        """Whether there is any figure."""
        jobs = self.bulk is not None and self.bulk.seconds is not None
        return jobs or any(result.repeats for result in self.cases)

    def of(self, case: Case) -> CaseResult | None:
        """The result of `case`, or `None` when the side ended before it."""
        return next((result for result in self.cases if result.case == case), None)


def measure(
    plan: LaunchPlan,
    job: OfflineJob,
    log: Path,
    *,
    limit: float,
    progress: Progress,
    into: SideResult | None = None,
) -> SideResult:
    """Run all cases of `job` in the child of `plan`; what was measured, failures included, is also
    put into `into`. `limit` is in seconds for the start, and then for each repeat and the bulk."""
    result = SideResult() if into is None else into
    news, total = _News(Path(job.news)), job.total_tokens
    progress(0, 0, "engine start")
    try:
        with server.running(plan, log) as child:
            deadline = time.monotonic() + limit
            while True:
                ended = (
                    child.returncode is not None
                )  # before reading, so that its last words are read
                with child.signals_wait():
                    for item in news:
                        if "done" in item or "error" in item:
                            result.error = item.get("error")
                            return result
                        if "progress" in item:
                            progress(item["progress"], total, "requests")
                        elif _take(item, result):
                            deadline = time.monotonic() + limit
                if ended:
                    raise child.failure("the engine ended")
                if time.monotonic() > deadline:
                    result.error = f"{_doing(result, job)} took longer than {limit:,.0f} s"
                    return result
                time.sleep(POLL_SECONDS)
    except ServerFailed as error:
        result.error = error.message.rstrip(".")
        if isinstance(error, FlagRefused):
            raise
        return result
    except (KeyboardInterrupt, SystemExit):
        for item in news:  # written since the last read
            _take(item, result)
        result.error = f"{_doing(result, job)} was interrupted"
        raise


def _take(item: dict[str, Any], result: SideResult) -> bool:
    """Put one item of news into `result`; return whether a timed step ended with it."""
    if "up" in item:
        result.up_s, result.capacity = float(item["up"]), int(item["capacity"])
        result.sglang, result.engine = item["sglang"], item["engine"]
        return True
    if "bulk" in item:
        turns = tuple(TurnResult(**turn) for turn in item["bulk"].get("turns", ()))
        result.bulk = BulkResult(turns, item["bulk"].get("refused"))
    if "case" not in item:
        return False
    case = Case(**item["case"])
    known = result.of(case)
    if known is not None:
        result.cases.remove(known)
    known = known or CaseResult(case)
    if "refused" in item:
        result.cases.append(replace(known, refused=item["refused"]))
    else:
        arrivals = [[(s, n) for s, n in one] for one in item["arrivals"]]
        result.cases.append(known.with_repeat(figures(arrivals)))
    return True


def _doing(result: SideResult, job: OfflineJob) -> str:
    if result.up_s is None:
        return "the start"
    for case in job.cases:
        known = result.of(case) or CaseResult(case)
        if known.refused is None and len(known.repeats) < job.repeats:
            which = f", repeat {len(known.repeats) + 1} of {job.repeats}" if job.repeats > 1 else ""
            return f"the case {case}{which}"
    return "the end" if result.bulk is not None or job.bulk is None else "the job"


class _News:
    """The complete lines of a growing file, each once; an iteration ends at its current end."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self._offset = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


Arrivals = Sequence[tuple[float, int]]
"""One request: pairs of seconds since all were sent and tokens by then; both ascend."""


@dataclass(frozen=True)
class Figures:
    """The figures of one repeat of a case, or their medians over several.

    Attributes:
        ttft_s: seconds until the last request of the batch has its first token.
        ttft_median_s: the median over the requests.
        ms_per_token: median of the time between two tokens of a request, milliseconds; `None` with
            too few tokens.
        tokens_per_second: new tokens of all requests together over the same stretch; `None` with
            too few tokens.
    """

    ttft_s: float
    ttft_median_s: float
    ms_per_token: float | None
    tokens_per_second: float | None


NUMBERS = tuple(each.name for each in fields(Figures))
"""The names of the figures."""


def figures(requests: Sequence[Arrivals]) -> Figures:
    """The figures of one batch, from one entry per request, each with at least one arrival.

    Decoding is timed while all requests run: from the first token of the last request to the end of
    the first one. The first quarter of the tokens in between is left out as warm-up.
    """
    firsts = [arrivals[0][0] for arrivals in requests]
    begin, end = max(firsts), min(arrivals[-1][0] for arrivals in requests)
    steady = [
        _last_three_quarters([a for a in arrivals if begin <= a[0] <= end]) for arrivals in requests
    ]
    gaps = [gap for arrivals in steady for gap in _gaps(arrivals)]
    rates = [rate for arrivals in steady if (rate := _rate(arrivals)) is not None]
    return Figures(
        ttft_s=begin,
        ttft_median_s=statistics.median(firsts),
        ms_per_token=1000 * statistics.median(gaps) if gaps else None,
        tokens_per_second=sum(rates) if len(rates) == len(requests) else None,
    )


def medians(repeats: Sequence[Figures]) -> Figures:
    """The median of each figure over the repeats, at least one, that have it."""
    found = {name: statistics.median(seen) for name in NUMBERS if (seen := _seen(repeats, name))}
    return Figures(**{name: found.get(name) for name in NUMBERS})  # type: ignore[arg-type]


def spread(repeats: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest value of each figure, by its name, where there is one."""
    return {name: (min(seen), max(seen)) for name in NUMBERS if (seen := _seen(repeats, name))}


def _seen(repeats: Sequence[Figures], name: str) -> list[float]:
    values = (getattr(one, name) for one in repeats)
    return [value for value in values if value is not None]


def _last_three_quarters(arrivals: Arrivals) -> Arrivals:
    return arrivals[len(arrivals) // 4 :]


def _gaps(arrivals: Arrivals) -> Iterator[float]:
    """Seconds per token between neighbours; tokens that arrive together share their time."""
    for (earlier, fewer), (later, more) in itertools.pairwise(arrivals):
        yield from [(later - earlier) / (more - fewer)] * (more - fewer)


def _rate(arrivals: Arrivals) -> float | None:
    if len(arrivals) < 2:
        return None
    seconds = arrivals[-1][0] - arrivals[0][0]
    return (arrivals[-1][1] - arrivals[0][1]) / seconds if seconds > 0 else None
