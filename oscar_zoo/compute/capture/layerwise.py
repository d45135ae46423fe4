"""Capture layer by layer: all sequences go through one layer before the next.

The queries of the whole set are therefore known while the keys and values of that layer are still
on the device, and one pass over the tokens is enough. Memory holds the hidden states of all
sequences, and the keys and values of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oscar_zoo.compute.capture.base import Meter, Run
from oscar_zoo.compute.capture.checkpoint import Position
from oscar_zoo.models.layer_replay import Entangled, ReplayPlan, ReplayState
from oscar_zoo.models.memory import free_memory

LAYERS = "layers"
MEMORY_SHARE = 0.6
"""Share of the free memory for hidden states; layers need the rest to run."""


def start_states(run: Run, plan: ReplayPlan) -> list[ReplayState] | None:
    """All sequences of this process before the first layer, or `None` when they do not fit."""
    geometry = run.sums.geometry
    widths = geometry.num_kv_heads * (geometry.head_dim + geometry.v_head_dim)
    tokens = sum(map(len, run.sequences))
    if tokens * (plan.hidden_bytes + widths * plan.item_bytes) > MEMORY_SHARE * free_memory(
        run.sums.device
    ):
        return None
    try:
        return [plan.prepare(run.forward, ids) for ids in run.sequences]
    except Entangled:
        return None


def run_layers(
    run: Run,
    plan: ReplayPlan,
    states: Sequence[ReplayState],
    done: int = 0,
    hidden: Sequence[Tensor] | None = None,
) -> None:
    """Fill `run.sums`.

    Args:
        states: of all sequences before the first layer.
        done: layers that an interrupted run finished; their sums are in `run.sums`.
        hidden: of every sequence behind these layers; without them the forward passes up to there
            are repeated.
    """
    meter = Meter(run.progress, run.sequences, len(plan.layers))
    first = 0
    if hidden is not None:
        first = done
        for state, there in zip(states, hidden, strict=True):
            state.hidden = there.to(state.hidden.device)
    meter.tick(first * sum(map(len, run.sequences)), _where(first, plan))
    written = done
    for index in range(first, len(plan.layers)):
        _run_layer(run, plan, states, index, meter, capture=index >= done)
        if index >= done and run.checkpoint is not None and run.checkpoint.due():
            fresh = {layer: sums for layer, sums in run.sums.layers.items() if layer >= written}
            run.checkpoint.save(
                Position(LAYERS, index + 1),
                fresh,
                sequences=len(states),
                add=True,
                hidden=[state.hidden for state in states],
            )
            written = index + 1


def _run_layer(
    run: Run,
    plan: ReplayPlan,
    states: Sequence[ReplayState],
    index: int,
    meter: Meter,
    *,
    capture: bool,
) -> None:
    """All sequences through one layer, then its weighted sums."""
    capture = capture and index in run.sums.geometry.attention_layers
    kept: list[tuple[Tensor, Tensor]] = []

    def sink(layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        run.sums.add(layer, query, key, value, output)
        kept.append((key, value))

    run.listen(sink if capture else None)
    for state, ids in zip(states, run.sequences, strict=True):
        state.advance(plan.layers[index], index)
        meter.tick(len(ids), _where(index, plan))
    if not capture:
        return
    run.set_weights(run.sums.layer(index), index)
    if "weighted" in run.sums.needs:
        target = run.sums.target(index, run.tokens)
        for key, value in kept:
            run.sums.layer(index).add_weighted(key, value, target)


def _where(index: int, plan: ReplayPlan) -> str:
    return f"layer {index + 1} of {len(plan.layers)}"
