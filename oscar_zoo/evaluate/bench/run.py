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
from pathlib import Path
from typing import Any

from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.engines.sglang.offline_process import Case, OfflineJob
from oscar_zoo.errors import FlagRefused, ServerFailed
from oscar_zoo.evaluate.bench.report import CaseResult, Figures, JobResult, Side, Turn

POLL_SECONDS = 0.1
Progress = Callable[[int, int, str], None]
"""Called with the tokens done, the tokens in all and what is done; a total of 0 means unknown."""
Arrivals = Sequence[tuple[float, int]]
"""One request: pairs of seconds since all were sent and tokens by then; both ascend."""


def measure(
    plan: LaunchPlan, job: OfflineJob, log: Path, side: Side, *, limit: float, progress: Progress
) -> None:
    """Run all cases of `job` in the child of `plan`, and put what was measured, failures included,
    into `side`. `limit` is in seconds for the start, and then for each repeat and the bulk."""
    news = _News(Path(job.news))
    progress(0, 0, "engine start")
    try:
        with server.running(plan, log) as child:
            deadline = time.monotonic() + limit
            while True:
                ended = child.returncode is not None  # asked before its last words are read
                with child.signals_wait():
                    for item in news:
                        if "done" in item or "error" in item:
                            side.error = item.get("error")
                            return
                        if "progress" in item:
                            progress(item["progress"], job.total_tokens, "requests")
                        elif _take(item, side, job):
                            deadline = time.monotonic() + limit
                if ended:
                    raise child.failure("the engine ended")
                if time.monotonic() > deadline:
                    side.error = f"{_doing(side, job)} took longer than {limit:,.0f} s"
                    return
                time.sleep(POLL_SECONDS)
    except ServerFailed as error:
        side.error = error.message.rstrip(".")
        if isinstance(error, FlagRefused):
            raise
    except (KeyboardInterrupt, SystemExit):
        for item in news:  # written since the last read
            _take(item, side, job)
        side.error = f"{_doing(side, job)} was interrupted"
        raise


def _take(item: dict[str, Any], side: Side, job: OfflineJob) -> bool:
    """Put one item of news into `side`; return whether a timed step ended with it."""
    if "up" in item:
        side.start_s, side.capacity = float(item["up"]), int(item["capacity"])
        side.sglang, side.engine = item["sglang"], item["engine"]
        return True
    if "bulk" in item:
        turns = tuple(Turn(**turn) for turn in item["bulk"].get("turns", ()))
        side.job = JobResult(turns, item["bulk"].get("refused"))
    if "case" not in item:
        return False
    result = side.of(Case(**item["case"]))
    if result is None:
        result = CaseResult(**item["case"], wanted=job.repeats)
        side.cases.append(result)
    if "refused" in item:
        result.refuse(item["refused"])
    else:
        result.add(figures(item["arrivals"]))
    return True


def _doing(side: Side, job: OfflineJob) -> str:
    if side.start_s is None:
        return "the start"
    for case in job.cases:
        known = side.of(case)
        done = 0 if known is None else known.repeats
        if done < job.repeats and not (known and known.refused):
            which = f", repeat {done + 1} of {job.repeats}" if job.repeats > 1 else ""
            return f"the case {case}{which}"
    return "the end" if side.job is not None or job.bulk is None else "the job"


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


def figures(requests: Sequence[Arrivals]) -> Figures:
    """The figures of one batch, from one entry per request, each with at least one arrival.

    Decoding is timed while all requests run: from the first token of the last request to the end of
    the first one. The first quarter of the tokens in between is left out as warm-up.
    """
    firsts = [arrivals[0][0] for arrivals in requests]
    begin, end = max(firsts), min(arrivals[-1][0] for arrivals in requests)
    gaps, rates = list[float](), list[float]()
    for arrivals in requests:
        shared = [one for one in arrivals if begin <= one[0] <= end]
        steady = shared[len(shared) // 4 :]
        for (earlier, fewer), (later, more) in itertools.pairwise(steady):
            # Tokens that arrive together share their time.
            gaps += [(later - earlier) / (more - fewer)] * (more - fewer)
        seconds = steady[-1][0] - steady[0][0] if steady else 0
        if seconds > 0:
            rates.append((steady[-1][1] - steady[0][1]) / seconds)
    return {
        "ttft_s": begin,
        "ttft_median_s": statistics.median(firsts),
        "ms_per_token": 1000 * statistics.median(gaps) if gaps else None,
        "tokens_per_second": sum(rates) if len(rates) == len(requests) else None,
    }
