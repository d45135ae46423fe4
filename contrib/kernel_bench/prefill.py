"""Where the attention of a long prompt goes, as a server runs it: in chunks, over rows made of the
codes of what is cached, by parts of one layer.

A part's time is that between two events around its launches. Beside it stands what the same chunks
take over 16-bit rows that lie in order, with the log-sum-exps that ours needs for its merge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import ops
import torch
from results import ResultRow, row
from timing import Timing

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/support"))

from cache_oracle import PlainPrefill
from small_caches import CacheShape

from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import Softmax, StepInput
from oscar_zoo.runtime.int2_cache import PIECE_TOKENS
from oscar_zoo.runtime.prefill import FlashInferPrefill

PROMPT, CHUNK, DRY = 100_352, 8192, (220, 110)


class Parts:
    """Seconds of every part, of which the same name may come many times."""

    def __init__(self) -> None:
        self._clock = torch.cuda.Event if torch.cuda.is_available() else _NoEvent
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time counts for `name`."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin, end = (self._clock(enable_timing=True) for _ in "be")
            begin.record()
            result = call(*arguments, **options)
            end.record()
            self._spans.setdefault(name, []).append((begin, end))
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Seconds by name since the last time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found = {
            name: sum(begin.elapsed_time(end) for begin, end in spans) / 1e3
            for name, spans in self._spans.items()
        }
        self._spans.clear()
        return found


class _NoEvent:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 1.0


def prefill(bench: ops.OpBench) -> Iterator[ResultRow]:
    """Time the parts of a whole prompt and of its last chunk."""
    heads, dry = bench.plan.heads, cases.DEVICE == "cpu"
    prompt, chunk = DRY if dry else (PROMPT, CHUNK)
    shape = CacheShape(
        heads.num_kv_heads, heads.group, (heads.k_spec, heads.v_spec), heads.sink, heads.recent,
        rows=2, slots=prompt + 1, longest=prompt, piece=chunk if dry else PIECE_TOKENS,
        dtype=cases.DTYPE, device=cases.DEVICE,
    )  # fmt: skip
    parts, softmax = Parts(), Softmax(heads.k_spec.head_dim**-0.5)
    kernel: Any = PlainPrefill() if dry else FlashInferPrefill(
        num_q_heads=shape.num_q_heads, num_kv_heads=shape.heads, head_dims=shape.dims,
        softmax=softmax, dtype=shape.dtype, device=shape.device,
    )  # fmt: skip
    whole = kernel.whole
    for name in ("chunk", "whole", "merge"):
        setattr(kernel, name, parts.of(f"attention, {name}", getattr(kernel, name)))
    timed = {name: parts.of(name, getattr(KERNELS, name)) for name in ("write", "materialize")}
    slots = shape.slot_table()
    slots[1] = 1 + torch.randperm(prompt, device=shape.device).int()
    made = shape.cache(replace(KERNELS, **timed), shape.table(), slots, kernel)
    step = parts.of("all", made.forward)
    rows = [cases.normal(prompt, width).to(shape.dtype) for width in shape.widths]
    for counted in (False, True):
        all_parts: dict[str, float] = {}
        made.windows.hand_out([1])
        for start in range(0, prompt, chunk):
            new, device = min(chunk, prompt - start), {"device": shape.device}
            row_of, length = torch.tensor([1], **device), torch.tensor([start + new], **device)
            written = slots[1, start : start + new].long()
            made.begin(StepInput("extend", row_of, (1,), length, written, (start,), (new,)))
            step(0, *(x[start : start + new] for x in rows))
            last = parts.take()
            all_parts = {
                name: all_parts.get(name, 0) + last.get(name, 0) for name in all_parts | last
            }
        if counted:
            case = f"{new:,} over {start:,}"
            yield from _rows(bench, f"a prompt of {prompt:,}", all_parts)
            yield from _rows(bench, case, last)
            plain = _plain(whole, heads.num_kv_heads, rows, start, softmax, parts)
            yield from _rows(bench, case, plain)


def _plain(
    whole: Callable[..., Any],
    kv_heads: int,
    rows: list[Any],
    start: int,
    softmax: Any,
    parts: Parts,
) -> dict[str, float]:
    """Of the queries behind `start` over the rows in front of it, in one call."""
    query, key, value = (x.view(len(x), -1, x.shape[1] // kv_heads) for x in rows)
    dim = key.shape[-1]
    query = query.reshape(len(query), -1, dim)
    run = parts.of("attention of 16-bit rows", whole)
    for _ in range(3):
        parts.take()
        run(query[start:], key[:start], value[:start], softmax)
    return parts.take()


def _rows(bench: ops.OpBench, case: str, found: dict[str, float]) -> Iterator[ResultRow]:
    for name, seconds in found.items():
        yield row("prefill", case, name, Timing(seconds, seconds, seconds), 0, bench.bandwidth)
