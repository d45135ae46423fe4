"""What a computation works on: the model, its text, and the sums over a run of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.compute.capture.run import Captured, CaptureRequest
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import CalibrationData, check_overlap, load_calibration
from oscar_zoo.compute.heldout_check import check_heldout
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.options import AUTO, LONGEST_DEFAULT, ComputeOptions, sequence_length
from oscar_zoo.compute.phases import CAPTURE
from oscar_zoo.compute.width_wish import check_wish
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models.loading import LoadedModel, load_model, load_tokenizer
from oscar_zoo.models.memory import Workload
from oscar_zoo.models.model_source import inspect_model

ENOUGH_TOKENS = 5000
"""Published fits stop changing near this number of tokens; fewer give a remark."""


@dataclass(frozen=True)
class Subject:
    """The model of a job; `loaded` is `None` before its weights are read."""

    block: ModelBlock
    tokenizer: Any
    loaded: LoadedModel | None


def load_subject(options: ComputeOptions) -> Subject:
    """Read the model of a job."""
    loaded = load_model(
        options.model,
        revision=options.revision,
        dtype=options.dtype,
        device=options.device,
        model_id=options.model_id,
        stream=options.stream_weights,
        workload=Workload(
            min(options.seq_len or LONGEST_DEFAULT, options.calib_tokens), options.calib_tokens
        ),
    )
    return Subject(loaded.block, loaded.tokenizer, loaded)


def read_subject(options: ComputeOptions) -> Subject:
    """The model of a job without its weights; raises as `load_subject`."""
    block = inspect_model(options.model, revision=options.revision, model_id=options.model_id)
    return Subject(block, load_tokenizer(options.model, revision=options.revision), None)


def read_data(
    options: ComputeOptions, subject: Subject, methods: tuple[Method, ...]
) -> CalibrationData:
    """The sequences to calibrate with, and those held out for `auto` and for a choice of bits."""
    auto = options.method == AUTO
    check_wish(options.widths, options.recipe, subject.block)

    def pack(tokens: int, length: int) -> CalibrationData:
        return load_calibration(
            options.calib_data,
            subject.tokenizer,
            tokens=tokens,
            seq_len=length,
            seed=options.seed,
            chat_template=options.chat_template,
            heldout_tokens=options.heldout_tokens if auto or options.widths else 0,
        )

    data = pack(options.calib_tokens, sequence_length(options, subject.block))
    if any(method.needs for method in methods) and data.tokens_used < subject.block.head_dim:
        raise UsageError(
            f"{options.calib_data} gives {data.tokens_used} tokens for {subject.block.head_dim}"
            " channels per head.",
            hint=f"use more text: fits settle near {ENOUGH_TOKENS:,} tokens",
        )
    check_heldout(data, options, subject.block, pack)
    return check_overlap(data, allow_overlap=options.allow_overlap)


def run_capture(
    model: RunningModel,
    options: ComputeOptions,
    methods: tuple[Method, ...],
    data: CalibrationData,
    work: Path,
    progress: Progress,
) -> Captured | None:
    """Sums over a run of the model; `None` when no method needs data."""
    if not any(method.needs for method in methods):
        return None
    # Everything a fit can ask for costs little more than what one does, and the moments then serve
    # them all.
    needs = frozenset(need for method in METHODS.values() for need in method.needs)

    def told(done: int, total: int, where: str) -> None:
        progress(done, total, CAPTURE)

    request = CaptureRequest(data, needs, work, bool(options.resume), told)
    return model.capture(request)
