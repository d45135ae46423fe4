"""How many cached tokens are read from which tier."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from oscar_kernels.cache import BatchView, LayerCache
from oscar_zoo.runtime.dispatch import Ops

NOTHING = dict.fromkeys(("extend", "decode", "sink", "ring", "slot", "slot_sink"), 0)
"""Calls, and cached tokens per tier, over all layers; `slot_sink` are first tokens in INT2."""


@dataclass(frozen=True)
class WindowCoverage:
    """Which of the positions `[0, length)` of a request are not read as INT2, and from where."""

    length: int
    sink: range
    ring: range

    @property
    def compressed(self) -> int:
        first, last = max(self.sink.start, self.ring.start), min(self.sink.stop, self.ring.stop)
        return self.length - len(self.sink) - len(self.ring) + len(range(first, last))

    def compressed_sinks(self, sink: int) -> int:
        return sum(p not in self.sink and p not in self.ring for p in range(min(sink, self.length)))


def coverage(
    length: int, *, sink: int, recent: int, sink_from: int, ring_start: int
) -> WindowCoverage:
    """A query with `length` cached tokens reads `[sink_from, min(sink, length))` and
    `[max(length - recent, ring_start), length)` from the windows.

    Args:
        sink_from, ring_start: first position of the current owner in each store.
    """
    first = range(sink_from, max(sink_from, min(sink, length)))
    start = max(length - recent, ring_start)
    return WindowCoverage(length, first, range(start, max(start, length)))


def covers(cache: LayerCache, batch: BatchView) -> list[WindowCoverage]:
    windows, rows = batch.windows, batch.rows.long()
    state = zip(windows.sink_from[rows].tolist(), windows.ring_start[rows].tolist(), strict=True)
    lengths = batch.kv_indptr.diff().tolist()
    return [
        coverage(
            length,
            sink=cache.sink,
            recent=cache.recent,
            sink_from=min(sink_from, cache.sink),
            ring_start=ring_start,
        )
        for length, (sink_from, ring_start) in zip(lengths, state, strict=True)
    ]


def counting(ops: Ops, reads: Counter[str]) -> Ops:
    """And batches compared with what they promise to be: those of the layer before."""
    before: list[Any] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            cache = next(x for x in args if isinstance(x, LayerCache))
            batch = next(x for x in args if isinstance(x, BatchView))
            reads[name] += 1
            now = [x.tolist() for x in (batch.kv_indptr, batch.rows, *batch.windows.tensors)]
            assert not options.get("same_batch") or now == before, "another batch"
            before[:] = now
            for cover in covers(cache, batch):
                reads["sink"] += len(cover.sink)
                reads["ring"] += len(cover.ring)
                reads["slot"] += cover.compressed
                reads["slot_sink"] += cover.compressed_sinks(cache.sink)
            return op(*args, **options)

        return run

    return replace(ops, decode=counted("decode", ops.decode), extend=counted("extend", ops.extend))
