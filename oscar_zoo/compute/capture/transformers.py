"""Capture in process with transformers: two passes over the same tokens, in model order.

The first pass sums q, k and v; the second weighs v with the query covariance of the whole set, known only then.
Running the model twice keeps no row of any layer, needs no engine of our own and costs one more prefill of a few
thousand tokens: seconds beside loading the weights. The whole model must fit on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from oscar_zoo.compute import estimators
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.moments import Moments
from oscar_zoo.evaluate.models import LoadedModel, attention_scope

Sink = Callable[[int, Tensor, Tensor, Tensor], None]
"""`(layer_id, query [n_q, T, d], key [n_kv, T, d], value [n_kv, T, dv])`"""


class TransformersCapture:
    """`Capture` for a model that `evaluate.models` loaded; the model is left as it was found."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def capture(
        self, sequences: Sequence[Sequence[int]], *, weighted: bool, progress: Progress = no_progress
    ) -> Moments:
        """See `Capture.capture`.

        Raises:
            UnsupportedModel: a full-attention layer was not reached, or has a softmax that cannot be tapped.
        """
        moments = Moments.zeros(self._loaded.block, self._loaded.device)
        self._run(sequences, lambda layer, q, k, v: moments.layers[layer].add(q, k, v), "moments", progress)
        if weighted:
            targets = {layer: estimators.qqt(sums) for layer, sums in moments.layers.items()}
            self._run(
                sequences,
                lambda layer, q, k, v: moments.layers[layer].add_weighted(k, v, targets[layer]),
                "weights",
                progress,
            )
        return moments

    def _run(self, sequences: Sequence[Sequence[int]], sink: Sink, phase: str, progress: Progress) -> None:
        def tapped(layer_id: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            sink(layer_id, query[0], key[0], value[0])
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
            )

        done, total = 0, sum(len(sequence) for sequence in sequences)
        progress(done, total, phase)
        with torch.inference_mode(), attention_scope(self._loaded, tapped):
            for sequence in sequences:
                ids = torch.tensor([list(sequence)], device=self._loaded.device)
                # the decoder without its head: logits over the vocabulary are not needed
                self._loaded.model.base_model(input_ids=ids, use_cache=False)
                done += len(sequence)
                progress(done, total, phase)
