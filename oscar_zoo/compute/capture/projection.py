"""Which weights read the attention output: found by watching, not by name.

The output projection is the first matrix that a layer applies after its attention function
returned. It is found once per layer, during the first sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.checkpoint import LazyTensor, materialize

_EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class OutputProjections:
    """The output projection of every layer that was watched.

    Attributes:
        found: by layer id.
    """

    def __init__(self) -> None:
        self.found: dict[int, nn.Module] = {}
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    def watch(self, layer_id: int, attention: nn.Module) -> None:
        """Call this just before the attention function of `attention` returns.

        Only the first call counts.
        """
        if layer_id in self._watched:
            return
        self._watched.add(layer_id)
        handles = [
            module.register_forward_pre_hook(self._hook(layer_id))
            for module in attention.modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2
        ]
        self._handles += handles

    def close(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def weight(self, layer_id: int, geometry: Geometry, model_id: str) -> Tensor:
        """`[hidden, num_q_heads * dv]` of a layer that was watched."""
        module = self.found.get(layer_id)
        if module is None:
            raise _refused(model_id, layer_id, "has no matrix of its own")
        weight: Tensor = module.weight  # type: ignore[assignment]
        if isinstance(weight, LazyTensor):  # in its file until the layer runs
            weight = materialize(weight, lambda stored: stored.read(torch.device("cpu")))
        elif weight.is_meta:  # kept elsewhere by accelerate until then
            weight = module._hf_hook.weights_map["weight"]  # type: ignore[union-attr, index]
        columns = geometry.num_q_heads * geometry.v_head_dim
        if weight.dtype not in _EXACT:
            raise _refused(
                model_id, layer_id, f"is quantized ({str(weight.dtype).removeprefix('torch.')})"
            )
        if weight.ndim != 2 or weight.shape[1] != columns:
            raise _refused(
                model_id, layer_id, f"has shape {list(weight.shape)}, not [hidden, {columns}]"
            )
        return weight.detach()

    def _hook(self, layer_id: int) -> Callable[[nn.Module, Any], None]:
        def found(module: nn.Module, args: Any) -> None:
            self.found.setdefault(layer_id, module)

        return found


def _refused(model_id: str, layer_id: int, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the output projection of layer {layer_id} of {model_id} {what}.",
        hint="calibrate the checkpoint with unquantized, unmerged weights",
    )
