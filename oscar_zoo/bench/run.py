"""One side of a comparison: start its engine, read its news, and keep what was measured.

A side that fails keeps every repeat it measured and says in one line why it ended. `server.running`
handles signals, the process group and a parent that is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oscar_zoo.bench.timing import Figures, figures, medians, spread
from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.engines.sglang.offline_job import Case, OfflineJob
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
    """The result of one side; without `error` it holds every case of the job.

    Attributes:
        up_s: seconds until the engine was ready.
        capacity: tokens that its cache holds, as the engine reports.
        sglang: version of SGLang.
        engine: settings in force, as text.
        cases: results in the order of the job; the last one may lack repeats.
        bulk: result of the bulk, if the job has one.
        error: why the side ended early, in one line without a full stop.
    """

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
    """Run all cases of `job` in the child of `plan`.

    Args:
        limit: seconds for the start, and then for each repeat of a case, and for the bulk.

    Returns:
        What was measured, failures included; `into`, if it is given.
    """
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
