"""Layers that a checkpoint has for later tokens than the next one (multi-token prediction, MTP),
from its `config.json` and the names of its weights. Needs no torch.

Drafts can come from such a layer. A `config.json` often outlives it: quantized and fine-tuned
copies leave the weights out. So the names of the weights decide where they are known.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from oscar_zoo.models.config_file import ConfigFile

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""What a `config.json` calls the number of such layers. That of Qwen3-Next does not say it."""
_BEHIND = "model.layers.{layers}.eh_proj."
_APART = "mtp.fc."
PROJECTIONS = {
    "glm4_moe": _BEHIND,
    "qwen3_5": _APART,
    "qwen3_5_moe": _APART,
    "qwen3_5_moe_text": _APART,
    "qwen3_5_text": _APART,
    "qwen3_next": _APART,
}
"""Model types whose layer SGLang drafts with, and how the names of the weights begin that join a
token and the hidden state before it. `layers` is the number of other layers, which come first."""
MARKS = ("mtp", "nextn", "eh_proj")
"""What the names of the weights of such a layer have one of, in any model that SGLang reads."""
UNTRIED = ("ernie4_5_moe", "nemotron_h")
"""Other model types of the zoo whose layer SGLang drafts with; nobody has tried it."""
NEED_COUNT = ("glm4_moe",)
"""Those of which SGLang asks that `config.json` says 1."""


@dataclass(frozen=True)
class MtpLayers:
    """Whether drafts can come from a layer of the model.

    Attributes:
        state: `known` that they can, `said` by a `config.json` without the weights, `missing`, or
            `unknown`: SGLang may find one.
        why: a clause about the model that says why or why not.
    """

    state: Literal["known", "said", "missing", "unknown"]
    why: str


def mtp_layers(config: ConfigFile, names: Collection[str] | None) -> MtpLayers:
    """Look for such layers.

    Args:
        names: of all weights, or `None` where they are not known.
    """
    text = config.get_text_config()
    kind, said = str(getattr(config, "model_type", None)), _said(config) or _said(text)
    begin = PROJECTIONS.get(kind)
    if begin is None:
        untried = f"nobody has tried the MTP layer of a {kind} with this cache"
        absent = names is not None and not any(mark in name for name in names for mark in MARKS)
        why = untried if said else "it has no known MTP layer"
        return MtpLayers("missing" if absent else "unknown", why)
    if names is None:
        unseen = "its weights are not on this machine"
        if not said:
            return MtpLayers("unknown", unseen)
        return MtpLayers("said", f"its config.json names an MTP layer, but {unseen}")
    begin = begin.format(layers=getattr(text, "num_hidden_layers", None))
    if not any(name.startswith(begin) for name in names):
        lost = "its config.json names an MTP layer, but its weights have none"
        return MtpLayers("missing", lost if said else "it has no MTP layer")
    if kind in NEED_COUNT and said != 1:
        silent = "its weights have an MTP layer, but its config.json names none"
        return MtpLayers("missing", silent)
    return MtpLayers("known", "its weights have one")


def _said(config: Any) -> int:
    found = (getattr(config, name, None) for name in COUNTS)
    return next((count for count in found if isinstance(count, int) and count > 0), 0)
