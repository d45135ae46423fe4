"""Time of work on a GPU: one CUDA graph of many calls, its first reads cold, percentiles over
replays.

Without a GPU a call is timed once by the host's clock: enough to see that a benchmark runs, never a
measurement.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP = 3
COLD_BYTES = 256 << 20
"""Written before every replay: several times the L2 of any GPU."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over replays, and what a fifth of them stayed below and
    above."""

    median: float
    p20: float
    p80: float


def timed(
    calls: Sequence[Callable[[], object]], *, replays: int = 20, graph: bool = True
) -> Timing:
    """One of `calls`, run one after the other from a cold L2.

    Give one call per layer, each on memory of its own, so that no call finds what another left in
    the caches.

    Args:
        calls: launch only; nothing may be allocated that a replay could not reuse.
        graph: replay a CUDA graph; else launch anew each time, for what cannot be captured.
    """
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for call in calls:
            call()
        seconds = (time.perf_counter() - start) / len(calls)
        return Timing(seconds, seconds, seconds)
    replay = _captured(calls) if graph else _launched(calls)
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    seen = sorted(_seconds(replay, cold) / len(calls) for _ in range(replays))
    return Timing(statistics.median(seen), seen[len(seen) // 5], seen[len(seen) * 4 // 5])


def _launched(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    def replay() -> None:
        for call in calls:
            call()

    for _ in range(WARM_UP):
        replay()
    torch.cuda.synchronize()
    return replay


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    again = _launched(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again()
    replay: Callable[[], object] = graph.replay
    return replay


def _seconds(replay: Callable[[], object], cold: torch.Tensor | None = None) -> float:
    if cold is not None:
        cold.fill_(1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def bandwidth(size: int = 1 << 30, *, repeats: int = 10) -> float:
    """Bytes per second of device memory: the better of a large read and a large copy, which reads
    and writes.

    No graph: its copies take another, slower way. NaN without a GPU.
    """
    if not torch.cuda.is_available():
        return math.nan
    source = torch.ones(size // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for moved, call in ((size, source.max), (2 * size, lambda: target.copy_(source))):
        replay = _launched([call] * repeats)
        rates.append(moved * repeats / min(_seconds(replay) for _ in range(WARM_UP)))
    return max(rates)
