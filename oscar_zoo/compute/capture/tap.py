"""The attention calls of one model, watched one by one.

The caller routes the calls of a model's attention here and decides what the model computes. The tap
only watches: it refuses by name what cannot be calibrated, and passes rows on to a listener.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import brief
from oscar_zoo.compute.capture.base import RowSink
from oscar_zoo.compute.capture.projection import OutputProjections
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.attention import BLOCKED
from oscar_zoo.models.geometry import covers_context
from oscar_zoo.models.loading import LoadedModel


@dataclass
class Tap:
    """The attention of one model while it goes through `_dispatch`."""

    loaded: LoadedModel
    projections: OutputProjections | None = None
    sink: RowSink | None = None
    calls: Counter[int] = field(default_factory=Counter)

    def listen(self, sink: RowSink | None) -> None:
        """Who gets the rows from now on."""
        self.sink = sink

    def forward(self, ids: Sequence[int]) -> None:
        """The decoder over one sequence; logits over the vocabulary are not needed."""
        tokens = torch.tensor([list(ids)], device=self.loaded.device)
        self.loaded.model.base_model(input_ids=tokens, use_cache=False)

    def saw(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor, **rest: Any
    ) -> None:
        """One call of attention; `output` is `[1, T, n_q, dv]`."""
        layer = getattr(module, "layer_idx", None)
        if layer not in self.loaded.block.attention_layers:
            return
        self.calls[layer] += 1
        self._refuse(layer, query, key, value, **rest)
        if self.projections is not None:
            self.projections.watch(layer, module)
        if self.sink is not None:
            self.sink(layer, query[0], key[0], value[0], output[0].transpose(0, 1))

    def _refuse(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> None:
        block = self.loaded.block
        reasons = [what for name, what in BLOCKED.items() if rest.get(name) is not None]
        window = rest.get("sliding_window")
        if window is not None and not covers_context(
            window, self.loaded.model.config.get_text_config(decoder=True)
        ):
            reasons.append(f"a sliding window of {window} tokens")
        heads = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        if heads != (block.num_q_heads, block.num_kv_heads, block.head_dim, block.v_head_dim):
            reasons.append(
                f"query heads, KV heads, head_dim, v_head_dim {heads}, unlike its configuration"
            )
        if reasons:
            raise UnsupportedModel(
                f"layer {layer} of {block.id} ({type(self.loaded.model).__name__}) has"
                f" {reasons[0]}.",
                hint="its cache cannot be calibrated by this version",
            )

    def check_reached(self) -> None:
        """After one pass of the whole model."""
        block, name = self.loaded.block, type(self.loaded.model).__name__
        wrong = [layer for layer in block.attention_layers if self.calls[layer] != 1]
        if wrong and not any(self.calls[layer] for layer in wrong):
            raise UnsupportedModel(
                f"{block.id} ({name}) computes the attention of layers {brief(tuple(wrong))} in"
                " code of its own.",
                hint=(
                    "only models that use the attention interface of transformers can be calibrated"
                ),
            )
        if wrong:
            raise UnsupportedModel(
                f"layer {wrong[0]} of {block.id} ({name}) attends {self.calls[wrong[0]]} times per"
                " token.",
                hint="only layers with one cache each can be calibrated",
            )
