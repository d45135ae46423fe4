"""How many parameters a model has, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models.model_source import silent_transformers

# isort: split

import torch

from oscar_zoo.models.model_class import outline


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters of a model.

    Attributes:
        parameters: all parameters.
        active: parameters that one token uses. A token of a mixture of experts uses only the
            experts that its router picks.
    """

    parameters: int
    active: int


def model_size(config: Any, model_id: str) -> ModelSize | None:
    """Count the parameters of the model of a `transformers` configuration.

    The model is built on the meta device, so its weights take no memory.

    Returns:
        The size, or `None` when this model class cannot be built that way.
    """
    try:
        with torch.device("meta"), silent_transformers():
            model = outline(config, model_id)
    except Exception:  # the size is only information; loading the model reports what is wrong
        return None
    text = config.get_text_config(decoder=True)
    counts = (
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    # a token uses `share` of the `number` experts; a dense model counts as one expert of one
    share = getattr(text, "num_experts_per_tok", None) or 1
    number = next((count for count in counts if count), share)
    sizes = [
        (parameter.numel(), ".experts." in name) for name, parameter in model.named_parameters()
    ]
    idle = sum(size for size, of_expert in sizes if of_expert) * (number - share) // number
    total = sum(size for size, _ in sizes)
    return ModelSize(total, total - idle)
