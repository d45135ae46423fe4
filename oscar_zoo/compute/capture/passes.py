"""Token sequences in, moments of all full-attention layers out, in one of two orders.

*Layer by layer*, all sequences go through one layer before the next. The queries of the whole set
are then known while the keys and values of that layer are still on the device, and one pass is
enough. Memory holds the hidden states of all sequences, and the keys and values of one layer.

*Whole*, for layers that share more than hidden states and for more tokens than can be held between
layers, the model runs sequence by sequence: once for q, k, v and o, and a second time only when a
fit reads sums that weigh v with the query covariance of the whole set.

Both orders add the rows of one sequence at a time and in order, so the sums over rows are equal bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.capture.checkpoint import SUMS, Checkpoint, Position
from oscar_zoo.compute.moments import LayerMoments, Moments, Need, qqt
from oscar_zoo.models.layer_replay import Entangled, ReplayPlan, ReplayState
from oscar_zoo.models.memory import free_memory

Ticks = Callable[[int, int], None]
"""Called with what is done and what there is in all, of tokens here; a layer or a pass counts its
share of each token."""
RowSink = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""`(layer_id, query [n_q, T, d], key [n_kv, T, d], value [n_kv, T, dv], output [n_q, T, dv])` of
one sequence."""

LAYERS, ROWS, WEIGHTS = "layers", "rows", "weights"
"""Phases of a position: layer by layer, and the two passes of the whole model."""
START = Position(ROWS, 0)
MEMORY_SHARE = 0.6
"""Share of the free memory for hidden states; layers need the rest to run."""


@dataclass(frozen=True)
class Sums:
    """The sums that `needs` names, layer by layer, each on the device where its rows arrive; the
    result goes to `device`. A layer appears when it is first asked for."""

    geometry: Geometry
    needs: frozenset[Need]
    device: torch.device
    layers: dict[int, LayerMoments] = field(default_factory=dict)

    def layer(self, layer_id: int, device: torch.device | None = None) -> LayerMoments:
        """The sums of one layer, empty ones at first; on `device` when that is given."""
        if layer_id not in self.layers:
            shape = (self.geometry.num_kv_heads, self.geometry.head_dim, self.geometry.v_head_dim)
            with torch.inference_mode(False):  # they outlive the forward passes
                self.layers[layer_id] = LayerMoments.zeros(*shape, device=device or self.device)
        layer = self.layers[layer_id]
        if device is not None and layer.qq.device != device:
            for name in (*SUMS, "wo"):
                tensor = getattr(layer, name)
                setattr(layer, name, None if tensor is None else tensor.to(device))
        return layer

    def add(self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """A `RowSink`: the sums over rows."""
        layer = self.layer(layer_id, key.device)
        layer.add(query, key, value, output if "outputs" in self.needs else None)

    def target(self, layer_id: int, tokens: int) -> Tensor:
        """A of `sst/1` when the model is fed so many tokens: `[num_kv_heads, d, d]` float64 on the
        device of the layer's sums."""
        group = self.geometry.num_q_heads // self.geometry.num_kv_heads
        return qqt(replace(self.layer(layer_id), query_rows=group * tokens))

    def moments(self) -> Moments:
        """The sums of all layers, in order and on one device."""
        return Moments(
            self.geometry, {i: self.layer(i, self.device) for i in self.geometry.attention_layers}
        )


@dataclass(frozen=True)
class Run:
    """One capture: `sums` to fill, token ids, one pass of the whole model over one sequence (logits
    left out), who gets the rows of the following passes, what reads the output projection of a
    layer that has run into its sums, and where finished work is saved, if anywhere."""

    sums: Sums
    sequences: Sequence[Sequence[int]]
    forward: Callable[[Sequence[int]], None]
    listen: Callable[[RowSink | None], None]
    set_weights: Callable[[LayerMoments, int], None]
    progress: Ticks
    checkpoint: Checkpoint | None

    @property
    def tokens(self) -> int:
        """In all sequences."""
        return sum(map(len, self.sequences))


class _Meter:
    """Turns work done, in tokens times layers or passes, into progress."""

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self._steps, self._done = run, steps, 0

    def tick(self, tokens: int) -> None:
        """`tokens` more went through one step."""
        self._done += tokens
        self._run.progress(self._done // self._steps, self._run.tokens)


def start_states(run: Run, plan: ReplayPlan) -> list[ReplayState] | None:
    """All sequences before the first layer, or `None` when they do not fit or layers share more."""
    geometry = run.sums.geometry
    widths = geometry.num_kv_heads * (geometry.head_dim + geometry.v_head_dim)
    needed = run.tokens * (plan.hidden_bytes + widths * plan.item_bytes)
    if needed > MEMORY_SHARE * free_memory(run.sums.device):
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
    """Fill `run.sums` layer by layer, from the `states` of all sequences before the first layer. An
    interrupted run finished `done` layers, whose sums are in `run.sums`; without the `hidden`
    states behind them, forward passes up to there are repeated."""
    meter = _Meter(run, len(plan.layers))
    first = 0
    if hidden is not None:
        first = done
        for state, there in zip(states, hidden, strict=True):
            state.hidden = there.to(state.hidden.device)
    meter.tick(first * run.tokens)
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
    meter: _Meter,
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
        meter.tick(len(ids))
    if not capture:
        return
    run.set_weights(run.sums.layer(index), index)
    if "weighted" in run.sums.needs:
        target = run.sums.target(index, run.tokens)
        for key, value in kept:
            run.sums.layer(index).add_weighted(key, value, target)


def run_whole(run: Run, at: Position = START) -> None:
    """Fill `run.sums` with passes of the whole model, from where an interrupted run stood."""
    weighted = "weighted" in run.sums.needs
    meter = _Meter(run, 2 if weighted else 1)
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


def _pass(run: Run, meter: _Meter, phase: str, first: int) -> None:
    meter.tick(sum(map(len, run.sequences[:first])))
    for number, ids in enumerate(run.sequences[first:], first + 1):
        run.forward(ids)
        if phase == ROWS and number == 1:
            for layer, sums in run.sums.layers.items():
                run.set_weights(sums, layer)
        meter.tick(len(ids))
        if run.checkpoint is not None and run.checkpoint.due():
            seen = number if phase == ROWS else len(run.sequences)
            run.checkpoint.save(Position(phase, number), run.sums.layers, sequences=seen, add=False)
