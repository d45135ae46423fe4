"""What to compute, and the checks of it that need no long work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.names import check_part
from oscar_zoo.artifact.specs import ServingRecipe, check_groups
from oscar_zoo.compute.data import check_budget, check_source
from oscar_zoo.compute.folder import check_target
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.methods.table import METHODS, find_method
from oscar_zoo.compute.width_wish import WidthWish
from oscar_zoo.errors import UsageError
from oscar_zoo.models.loading import Dtype
from oscar_zoo.models.memory import check_device

AUTO = "auto"
"""The method that fits all others and keeps the best."""
HELDOUT_TOKENS = 8192
LONGEST_DEFAULT = 4096
"""Tokens of a calibration sequence when neither the caller nor the model says less."""


@dataclass(frozen=True)
class ComputeOptions:
    """What to compute.

    Attributes:
        model: local folder or Hugging Face id.
        model_id: name of the base model in the manifest; `None` for what `model` says.
        model_name: first part of the artifact id, without organisation.
        calib_data: text or JSONL file.
        calib_tokens: token budget.
        recipe: serving settings for the manifest; `requires` is completed from the fit.
        revision: of a Hugging Face id.
        seq_len: tokens of a calibration sequence; `None` for 4,096 or the model's context,
            whichever is less.
        method: a name of `methods.table`, or `auto` for the method that is best on held-out text.
        output_dir: the artifact's folder; `None` for `folder.default_target`.
        device, dtype: where and in which type the forward passes run; device `auto` is all GPUs
            together.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit
            otherwise.
        force: replace an artifact that is already in the folder.
        resume: go on from the state that an interrupted run of the same command left; `None` where
            there is one, and `True` refuses to go on from one of another command.
        chat_template: see `data.load_calibration`.
        heldout_tokens: kept apart for measuring, with `auto`.
        allow_overlap: calibrate although the text holds questions of an evaluation set.
        allow_poor: write a result that fails its gates.
        fast: `auto` decides by errors of attention alone.
        tune: `auto` tries the methods of `table.TUNED`, where that does not take too long.
        widths: bits of codes to choose per layer and side; `None` for 2 bits everywhere.
        raises: nobody asked for 2 bits: where they fail their gates, `auto` gives layers more.
        fixed_clip: keep the clip of `recipe`; otherwise `auto` fits it.
        seed: of the document order; `None` keeps the order of the file.
        created: RFC 3339 UTC time for the manifest; `None` for now.
    """

    model: str
    model_name: str
    calib_data: Path | str
    calib_tokens: int
    recipe: ServingRecipe
    model_id: str | None = None
    revision: str | None = None
    seq_len: int | None = None
    method: str = AUTO
    output_dir: Path | None = None
    device: str = "cpu"
    dtype: Dtype = "auto"
    stream_weights: bool | None = None
    force: bool = False
    resume: bool | None = None
    chat_template: bool | None = None
    heldout_tokens: int = HELDOUT_TOKENS
    allow_overlap: bool = False
    allow_poor: bool = False
    fast: bool = False
    tune: bool = True
    widths: WidthWish | None = None
    raises: bool = False
    fixed_clip: bool = False
    seed: int | None = None
    created: str | None = None


def check_options(options: ComputeOptions) -> tuple[Method, ...]:
    """The methods to fit, once all is checked that can be wrong before the model is read."""
    auto = options.method == AUTO
    methods = tuple(METHODS.values()) if auto else (find_method(options.method),)
    check_budget(options.calib_tokens, 1 if options.seq_len is None else options.seq_len)
    check_part(options.model_name, "model name")
    check_source(options.calib_data)
    if options.output_dir is not None:
        check_target(options.output_dir, force=options.force)
    check_device(options.device, several=True)
    return methods


def sequence_length(options: ComputeOptions, block: ModelBlock) -> int:
    """Tokens of a calibration sequence.

    First quantization groups and context are checked.
    """
    check_groups(block.head_dims, options.recipe.group_size, block.id)
    longest = block.rope.max_position if block.rope else None
    if options.seq_len is None:
        return min(LONGEST_DEFAULT, longest or LONGEST_DEFAULT)
    if longest is not None and options.seq_len > longest:
        raise UsageError(
            f"sequences of {options.seq_len} tokens are longer than the {longest} of {block.id}.",
            hint=f"use a sequence length of at most {longest}",
        )
    return options.seq_len
