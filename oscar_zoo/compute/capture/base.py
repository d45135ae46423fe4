"""What every capture engine does: token sequences in, moments of all full-attention layers out.

The order of work differs: layer by layer, or sequence by sequence in two passes. Both orders add
the rows of one sequence at a time and in order, so the sums over rows are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute import estimators
from oscar_zoo.compute.capture.checkpoint import SUMS, Checkpoint
from oscar_zoo.compute.layer_moments import LayerMoments, Need
from oscar_zoo.compute.moments import Moments

Progress = Callable[[int, int, str], None]
"""`(tokens done, tokens in all, where)`, such as `layer 7 of 36`; a layer or a pass counts its
share of each token."""

RowSink = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""`(layer_id, query [n_q, T, d], key [n_kv, T, d], value [n_kv, T, dv], output [n_q, T, dv])` of
one sequence."""


def no_progress(done: int, total: int, where: str) -> None:
    """Report nothing."""


class Meter:
    """Turns work done, in tokens times layers or passes, into `Progress`."""

    def __init__(self, progress: Progress, sequences: Sequence[Sequence[int]], steps: int) -> None:
        self._progress = progress
        self.steps = steps
        self._total = sum(map(len, sequences))
        self._done = 0

    def tick(self, tokens: int, where: str) -> None:
        """`tokens` more went through one step; 0 only says where the work is."""
        self._done += tokens
        self._progress(self._done // self.steps, self._total, where)


@dataclass(frozen=True)
class Sums:
    """The sums of this process, layer by layer, each on the device where its rows arrive.

    Attributes:
        geometry: of the model.
        needs: what fits will read; nothing else is summed.
        device: where the result goes.
        layers: by layer id; a layer appears when it is first asked for.
    """

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
            _move(layer, device)
        return layer

    def add(self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """A `RowSink`: the sums over rows."""
        layer = self.layer(layer_id, key.device)
        layer.add(query, key, value, output if "outputs" in self.needs else None)

    def target(self, layer_id: int, tokens: int) -> Tensor:
        """A of `sst/1`.

        Args:
            tokens: that the model is fed.

        Returns:
            `[num_kv_heads, d, d]` float64 on the device of the layer's sums.
        """
        group = self.geometry.num_q_heads // self.geometry.num_kv_heads
        return estimators.qqt(replace(self.layer(layer_id), query_rows=group * tokens))

    def moments(self) -> Moments:
        """The sums of all layers, in order and on one device."""
        return Moments(
            self.geometry, {i: self.layer(i, self.device) for i in self.geometry.attention_layers}
        )


@dataclass(frozen=True)
class Run:
    """One capture.

    Attributes:
        sums: to fill.
        sequences: token ids.
        forward: one pass of the whole model over one sequence, logits left out.
        listen: sets the function that gets the rows of the following passes.
        set_weights: reads the output projection of a layer that has run into its sums.
        progress: called after every sequence of every step.
        checkpoint: saves finished work; `None` saves nothing.
    """

    sums: Sums
    sequences: Sequence[Sequence[int]]
    forward: Callable[[Sequence[int]], None]
    listen: Callable[[RowSink | None], None]
    set_weights: Callable[[LayerMoments, int], None]
    progress: Progress
    checkpoint: Checkpoint | None

    @property
    def tokens(self) -> int:
        """In all sequences."""
        return sum(map(len, self.sequences))


def _move(layer: LayerMoments, device: torch.device) -> None:
    for name in (*SUMS, "wo"):
        tensor = getattr(layer, name)
        setattr(layer, name, None if tensor is None else tensor.to(device))
