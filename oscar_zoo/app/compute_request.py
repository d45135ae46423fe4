"""What to compute, and the one place of the defaults.

The command line, `pull --compute`, `serve` and Python callers all start from `ComputeRequest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.compute.methods.table import TABLE

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.models.loading import Dtype

METHODS = ("auto", *(name for name, row in TABLE.items() if row.publishable))
"""What users may ask for; `auto` measures all others on held-out text and keeps the best."""


@dataclass(frozen=True)
class ComputeRequest:
    """What to compute.

    Attributes:
        model: a local folder, a name of the zoo, or a hub id such as `Qwen/Qwen3-8B`.
        calib_data: text to calibrate on: a text or JSONL file, a folder of such files, a text known
            by name, or a Hugging Face dataset `ORG/NAME[@REV][:CONFIG][:SPLIT][#FIELD]`.
        calib_tokens: tokens to read; `None` for the number in the model's recipe, else 16,384.
        seq_len: tokens of a sequence; `None` for the recipe's, else up to 4,096.
        method: one of `METHODS`.
        clip: clip ratios to record for serving; `None` fits them with `auto`, and otherwise takes
            the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        output: the artifact's folder; `None` for `./<Model>/<tag>`.
        force: replace an artifact that is already in the folder.
        resume: continue from what an interrupted run of the same request left; `None` where it left
            something.
        seed: shuffles the documents; `None` keeps their order.
        chat_template: render text as chat, or chats as text; `None` decides by the data.
        allow_overlap: calibrate although the text holds questions of an evaluation set.
        allow_poor: write a result that fails its quality gates.
        fast: with `auto`, choose by errors of attention alone, without perplexity and recall.
        bits: 2 or 4 for codes of so many bits everywhere; another number is a budget, the average
            bits of an element at most, scales and offsets included; `auto` is the smallest budget
            with the quality of BF16. `None` for codes of 2 bits.
        max_loss: in place of `bits`: the fewest with at most this rise of perplexity, in percent.
        tune: with `auto`, also try `wush-tuned`, which reads the text once more.
        revision: commit, branch or tag of a model on a hub.
        model_id: identity to record for a local folder, `ORG/NAME`.
    """

    model: str
    calib_data: str = "manuals"
    calib_tokens: int | None = None
    seq_len: int | None = None
    method: str = "auto"
    clip: Clip | None = None
    group_size: int | None = None
    device: str | None = None
    dtype: Dtype = "auto"
    stream_weights: bool | None = None
    output: Path | None = None
    force: bool = False
    resume: bool | None = None
    seed: int | None = None
    chat_template: bool | None = None
    allow_overlap: bool = False
    allow_poor: bool = False
    fast: bool = False
    tune: bool = True
    bits: float | Literal["auto"] | None = None
    max_loss: float | None = None
    revision: str | None = None
    model_id: str | None = None
