"""Capture with the whole model at once.

This is for layers that share more than hidden states, and for more tokens than can be held between
layers. The first pass sums q, k, v and o of all layers. The second runs only when a fit reads its
sums: it weighs v with the query covariance of the whole set, which is known only then. No row
outlives its forward pass.
"""

from __future__ import annotations

from torch import Tensor

from oscar_zoo.compute.capture.base import Meter, Run
from oscar_zoo.compute.capture.checkpoint import Position

ROWS, WEIGHTS = "rows", "weights"
START = Position(ROWS, 0)


def run_whole(run: Run, at: Position = START) -> None:
    """Fill `run.sums`.

    Args:
        at: where an interrupted run of this engine stood; its sums are in `run.sums`.
    """
    weighted = "weighted" in run.sums.needs
    meter = Meter(run.progress, run.sequences, 2 if weighted else 1)
    run.listen(run.sums.add)
    _pass(run, meter, ROWS, at.done if at.phase == ROWS else len(run.sequences))
    if weighted:
        targets = {
            layer: run.sums.target(layer, run.tokens)
            for layer in run.sums.geometry.attention_layers
        }

        def weigh(layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
            run.sums.layer(layer).add_weighted(key, value, targets[layer])

        run.listen(weigh)
        _pass(run, meter, WEIGHTS, at.done if at.phase == WEIGHTS else 0)


def _pass(run: Run, meter: Meter, phase: str, first: int) -> None:
    where = f"pass {2 if phase == WEIGHTS else 1} of {meter.steps}"
    meter.tick(sum(map(len, run.sequences[:first])), where)
    for number, ids in enumerate(run.sequences[first:], first + 1):
        run.forward(ids)
        if phase == ROWS and number == 1:
            for layer, sums in run.sums.layers.items():
                run.set_weights(sums, layer)
        meter.tick(len(ids), where)
        if run.checkpoint is not None and run.checkpoint.due():
            seen = number if phase == ROWS else len(run.sequences)
            run.checkpoint.save(Position(phase, number), run.sums.layers, sequences=seen, add=False)
