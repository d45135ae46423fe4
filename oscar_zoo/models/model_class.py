"""Which class of transformers runs the language model of a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models import model_source  # noqa: F401

# isort: split

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from oscar_zoo.errors import UnsupportedModel

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What a file of transformers imports when its attention can be watched and replaced."""


def outline(config: Any, model_id: str) -> Any:
    """The model with unread weights on the device in force; call it with `meta`.

    Models with images are those of text and image together, and get text only.
    """
    kind = type(config)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if kind in auto._model_mapping:
            # transformers chooses, and not the file, which could name a kernel of a hub
            config._experts_implementation = None
            model = auto.from_config(config, trust_remote_code=False, attn_implementation=None)
            _check_attention(model, model_id)
            return model
    raise UnsupportedModel(
        f"transformers runs no language model for {model_id} ({config.model_type}).",
        hint="choose a model that transformers runs",
    )


def _check_attention(model: Any, model_id: str) -> None:
    files = {type(module).__module__ for module in model.modules()}
    if not any(hasattr(sys.modules.get(file), INTERFACE) for file in files):
        raise UnsupportedModel(
            f"{model_id} ({type(model).__name__}) computes attention in code of its own, which"
            " nothing can watch.",
            hint="choose a model that transformers runs through its attention interface",
        )
