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
from dataclasses import replace

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.capture.checkpoint import SUMS, Checkpoint, Saved
from oscar_zoo.compute.moments import LayerMoments, Moments, Need, qqt
from oscar_zoo.models.layer_replay import Entangled, ReplayPlan, ReplayState
from oscar_zoo.models.memory import free_memory

Ticks = Callable[[int, int], None]
"""Called with what is done and what there is in all, of tokens here; a layer or a pass counts its
share of each token."""
RowSink = Callable[..., None]
"""`(layer_id, query [n_q, T, d], key [n_kv, T, d], value [n_kv, T, dv], output [n_q, T, dv])` of
one sequence, and the `loss` of latents."""
LAYERS, ROWS, WEIGHTS = "layers", "rows", "weights"
"""Phases of a position: layer by layer, and the two passes of the whole model."""
MEMORY_SHARE = 0.6
"""Share of the free memory for hidden states; layers need the rest to run."""


class Passes:
    """One capture: the sums that `needs` names, each on the device where its rows arrive."""

    def __init__(
        self,
        geometry: Geometry,
        needs: frozenset[Need],
        device: torch.device,
        sequences: Sequence[Sequence[int]],
        *,
        forward: Callable[[Sequence[int]], None],
        listen: Callable[[RowSink | None], None],
        weights: Callable[[int], Tensor],
        progress: Ticks,
        checkpoint: Checkpoint | None,
    ) -> None:
        """
        Args:
            device: where the result goes.
            forward: one pass of the whole model over one sequence, logits left out.
            listen: who gets the rows of the following passes.
            weights: the output projection of a layer that has run.
        """
        self._geometry, self._needs, self._device = geometry, needs, device
        self._sequences, self._tokens = sequences, sum(map(len, sequences))
        self._forward, self._listen, self._weights = forward, listen, weights
        self._progress, self._checkpoint = progress, checkpoint
        self._layers: dict[int, LayerMoments] = {}
        self._steps, self._done = 1, 0

    def run(self, plan: ReplayPlan | None, saved: Saved | None, *, streamed: bool) -> Moments:
        """Run layer by layer where that is possible, from where an interrupted run stopped."""
        once = streamed or "weighted" in self._needs  # layer by layer all is needed once only
        states = self._start_states(plan) if plan and once else None
        if saved and self._checkpoint and (states is not None) != (saved.phase == LAYERS):
            self._checkpoint.clear()
            saved = None
        if plan is not None and states is not None:
            self._run_layers(plan, states, saved)
        else:
            del states  # makes room
            self._run_whole(saved)
        ids = self._geometry.attention_layers
        return Moments(self._geometry, {layer: self._sums(layer, self._device) for layer in ids})

    def _sums(self, layer_id: int, device: torch.device | None = None) -> LayerMoments:
        """The sums of one layer, empty ones at first; on `device` when that is given."""
        if layer_id not in self._layers:
            one = self._geometry
            with torch.inference_mode(False):  # they outlive the forward passes
                self._layers[layer_id] = LayerMoments.zeros(
                    one.num_kv_heads, one.head_dim, one.v_head_dim, device=device or self._device
                )
        layer = self._layers[layer_id]
        if device is not None and layer.qq.device != device:
            for name in (*SUMS, "wo"):
                tensor = getattr(layer, name)
                setattr(layer, name, None if tensor is None else tensor.to(device))
        return layer

    def _add(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        loss: Tensor | None = None,
    ) -> None:
        wanted = output if "outputs" in self._needs else None
        self._sums(layer, key.device).add(query, key, value, wanted, loss)

    def _set_weights(self, layer: int) -> None:
        if "weights" in self._needs:
            with torch.inference_mode(False):
                self._sums(layer).set_weights(self._weights(layer))

    def _target(self, layer_id: int) -> Tensor:
        """A of `sst/1` of all tokens: `[num_kv_heads, d, d]` float64 on the layer's device."""
        group = self._geometry.num_q_heads // self._geometry.num_kv_heads
        return qqt(replace(self._sums(layer_id), query_rows=group * self._tokens))

    def _tick(self, tokens: int) -> None:
        """`tokens` more went through one layer or pass."""
        self._done += tokens
        self._progress(self._done // self._steps, self._tokens)

    def _start_states(self, plan: ReplayPlan) -> list[ReplayState] | None:
        """All sequences before the first layer; `None` when they do not fit or layers share
        more."""
        one = self._geometry
        widths = one.num_kv_heads * (one.head_dim + one.v_head_dim)
        needed = self._tokens * (plan.hidden_bytes + widths * plan.item_bytes)
        if needed > MEMORY_SHARE * free_memory(self._device):
            return None
        try:
            return [plan.prepare(self._forward, ids) for ids in self._sequences]
        except Entangled:
            return None

    def _run_layers(
        self, plan: ReplayPlan, states: Sequence[ReplayState], saved: Saved | None
    ) -> None:
        """From the `states` before the first layer. Where an interrupted run left no hidden states,
        forward passes up to its layer are repeated."""
        self._steps = len(plan.layers)
        done = written = saved.done if saved else 0
        if saved is not None:
            self._layers |= {i: sums for i, sums in saved.layers.items() if i < done}
        first = 0
        if saved is not None and saved.hidden is not None:
            first = done
            for state, there in zip(states, saved.hidden, strict=True):
                state.hidden = there.to(state.hidden.device)
        self._tick(first * self._tokens)
        for index in range(first, len(plan.layers)):
            self._run_layer(plan, states, index, capture=index >= done)
            if index >= done and self._checkpoint is not None and self._checkpoint.due():
                fresh = {layer: sums for layer, sums in self._layers.items() if layer >= written}
                written = index + 1
                self._checkpoint.save(
                    LAYERS,
                    written,
                    fresh,
                    sequences=len(states),
                    add=True,
                    hidden=[state.hidden for state in states],
                )

    def _run_layer(
        self, plan: ReplayPlan, states: Sequence[ReplayState], index: int, *, capture: bool
    ) -> None:
        """All sequences through one layer, then its weighted sums."""
        capture = capture and index in self._geometry.attention_layers
        kept: list[tuple[Tensor, Tensor]] = []

        def sink(
            layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor, **loss: Tensor
        ) -> None:
            self._add(layer, query, key, value, output, **loss)
            kept.append((key, value))

        self._listen(sink if capture else None)
        for state, ids in zip(states, self._sequences, strict=True):
            state.advance(plan.layers[index], index)
            self._tick(len(ids))
        if not capture:
            return
        self._set_weights(index)
        if "weighted" in self._needs:
            target = self._target(index)
            for key, value in kept:
                self._sums(index).add_weighted(key, value, target)

    def _run_whole(self, saved: Saved | None) -> None:
        """Passes of the whole model."""
        weighted, number = "weighted" in self._needs, len(self._sequences)
        self._steps = 2 if weighted else 1
        phase, done = (saved.phase, saved.done) if saved else (ROWS, 0)
        self._layers |= saved.layers if saved else {}
        self._listen(self._add)
        self._pass(ROWS, done if phase == ROWS else number)
        if weighted:
            targets = {layer: self._target(layer) for layer in self._geometry.attention_layers}

            def weigh(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
                self._sums(layer).add_weighted(key, value, targets[layer])

            self._listen(weigh)
            self._pass(WEIGHTS, done if phase == WEIGHTS else 0)

    def _pass(self, phase: str, first: int) -> None:
        self._tick(sum(map(len, self._sequences[:first])))
        for number, ids in enumerate(self._sequences[first:], first + 1):
            self._forward(ids)
            if phase == ROWS and number == 1:
                for layer in self._layers:
                    self._set_weights(layer)
            self._tick(len(ids))
            if self._checkpoint is not None and self._checkpoint.due():
                seen = number if phase == ROWS else len(self._sequences)
                self._checkpoint.save(phase, number, self._layers, sequences=seen, add=False)
