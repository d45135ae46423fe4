"""The time that attention adds to a decode step, measured between matrix products as in a model.

A kernel that is timed by itself finds its code and its small tables in the caches. In a model the
weights of a layer have swept them, and the kernel in front is another one. The products alone are
timed too and taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice

import baselines
import cases
import ops
import roofline
import torch
from plain_rows import Baseline, rows
from results import ResultRow, row
from timing import Timing, timed
from torch import Tensor

Call = Callable[[], object]

WEIGHTS, TINY_WEIGHTS = (4096, 49_152), (16, 32)
"""Shape of the product between two layers: 400 MB, about as much as a layer of an 8B model
reads."""


def step(bench: ops.OpBench) -> Iterator[ResultRow]:
    """Write and attention of a decode step by each path, and attention of 16-bit rows, on every
    shape."""
    plan, heads, baseline = bench.plan, bench.plan.heads, baselines.available()
    shape = WEIGHTS if torch.cuda.is_available() else TINY_WEIGHTS
    weights = [cases.normal(*shape) for _ in range(plan.layers)]
    for number, length in plan.decode:
        lengths, case = [length] * number, f"{number} x {length}"
        moved = roofline.decode(heads, lengths)
        products = _products(weights, number)
        alone = timed([partial(_run, products)], replays=plan.replays)
        for name, parts in _parts(
            bench, lengths, cases.layers(moved, plan.layers), baseline
        ).items():
            layers = [islice(cycle(part), plan.layers) for part in parts]
            calls = [call for together in zip(products, *layers, strict=True) for call in together]
            whole = timed([partial(_run, calls)], replays=plan.replays)
            yield row(
                "in step",
                case,
                name,
                _difference(whole, alone, plan.layers),
                moved,
                bench.bandwidth,
            )


def _parts(
    bench: ops.OpBench, lengths: list[int], count: int, baseline: Baseline
) -> dict[str, list[Sequence[Call]]]:
    """The calls that every layer makes one after the other, for `count` layers, by name."""
    heads = bench.plan.heads
    job = cases.attention_layers(heads, lengths, count)
    written = [cases.write_layer(heads, lengths, 1) for _ in range(count)]
    found: dict[str, list[Sequence[Call]]] = {
        baseline.name: [baseline.decode(rows(heads, lengths, count))]
    }
    for name in ops.PATHS:
        reason = (
            None
            if name == "triton"
            else ops.cuda_cannot_decode(job) or ops.cuda_cannot_write(written[0])
        )
        if reason:
            bench.note(f"in step: no CUDA path: {reason}")
            continue
        write = ops.write_calls(written, step=True, op=ops.WRITES[name].write_kv_int2)
        decode = ops.decode_calls(ops.PATHS[name], job, bench.plan.layers)
        found |= {
            f"{name} write": [write],
            f"{name} attention": [decode],
            f"{name} both": [write, decode],
        }
    return found


def _products(weights: list[Tensor], number: int) -> list[Call]:
    query, out = cases.normal(number, len(weights[0])), cases.normal(number, weights[0].shape[1])
    return [partial(torch.mm, query, one, out=out) for one in weights]


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _difference(whole: Timing, alone: Timing, layers: int) -> Timing:
    """Seconds of one layer."""
    return Timing(*((x - alone.median) / layers for x in (whole.median, whole.p20, whole.p80)))
