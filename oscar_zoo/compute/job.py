"""The use case: a model and a calibration file become a verified artifact folder.

Load, read the data, capture, fit, assemble in memory, verify those very bytes, then write the folder in one step. An
interrupt, a crash or a full disk at any point leaves the target as it was. The same options give the same digest on
the same machine and versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, Numerics
from oscar_zoo.artifact.names import ArtifactId, CalibrationTag
from oscar_zoo.artifact.outcome import Outcome, Verified, why
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.data import CalibrationData, load_calibration
from oscar_zoo.compute.fit import fit
from oscar_zoo.compute.folder import check_target, write_folder
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.options import ComputeOptions, check_options, sequence_length
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.models import LoadedModel, load_model

__all__ = ["ComputeOptions", "ComputeResult", "compute_artifact"]

ENOUGH_TOKENS = 5000
"""About where published fits stop changing; fewer are allowed and remarked on."""


@dataclass(frozen=True)
class ComputeResult:
    """A finished artifact.

    Attributes:
        path: its folder.
        artifact_id: `<Model>/<tag>`.
        manifest: content of its `oscar.json`.
        verified: outcome of the full verification.
        notes: what the user should know, in sentences.
        seconds: duration by phase: `load`, `capture`, `fit` (with verification), `write`.
    """

    path: Path
    artifact_id: ArtifactId
    manifest: Manifest
    verified: Verified
    notes: tuple[str, ...]
    seconds: Mapping[str, float]


@dataclass
class _Clock:
    """Seconds by phase, and news of each phase's start."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(0, 0, name)
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def compute_artifact(options: ComputeOptions, *, progress: Progress = no_progress) -> ComputeResult:
    """Calibrate a model and write the artifact.

    Args:
        progress: `(tokens done, tokens in all, phase)`; phases without tokens report `(0, 0, phase)` at their start.

    Raises:
        UsageError: options that make no sense together, or data that is no text.
        PathNotFound, InvalidModel, UnsupportedModel: from reading model and data.
        OutputExists: the folder is taken; see `folder.check_target`.
        ComputeFailed: the capture was incomplete, the device ran out of memory, or the result failed verification.
        StorageError: the disk refused.
    """
    method = check_options(options)
    clock = _Clock(progress)
    with clock.phase("load"):
        loaded = load_model(
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            device=options.device,
            model_id=options.model_id,
        )
    data = _read_data(options, loaded, method)
    artifact_id = _artifact_id(options, method, data)
    target = options.output_dir or Path(artifact_id.model) / artifact_id.tag
    check_target(target, force=options.force)
    with clock.phase("capture"):
        moments = _capture(loaded, method, data, progress)
    with clock.phase("fit"):
        files = assemble(fit(moments, method), _facts(options, method, loaded, data, artifact_id))
        verified = _require_verified(verify_files(files, strict=True))
    with clock.phase("write"):
        write_folder(target, files, force=options.force)
    manifest = Manifest.from_bytes(files[FILE_NAME])
    return ComputeResult(target, artifact_id, manifest, verified, _notes(data, method), clock.seconds)


def _read_data(options: ComputeOptions, loaded: LoadedModel, method: Method) -> CalibrationData:
    seq_len = sequence_length(options, loaded.block)
    data = load_calibration(
        options.calib_data, loaded.tokenizer, tokens=options.calib_tokens, seq_len=seq_len, seed=options.seed
    )
    if method.needs and data.tokens_used < loaded.block.head_dim:
        raise UsageError(
            f"{options.calib_data} gives {data.tokens_used} tokens for {loaded.block.head_dim} channels per head.",
            hint=f"use more text: fits settle near {ENOUGH_TOKENS:,} tokens",
        )
    return data


def _artifact_id(options: ComputeOptions, method: Method, data: CalibrationData) -> ArtifactId:
    tag = CalibrationTag(data.tokens_used, len(data.sequences), options.recipe.group_size, method.variant)
    return ArtifactId(options.model_name, str(tag))


def _capture(loaded: LoadedModel, method: Method, data: CalibrationData, progress: Progress) -> Moments:
    if not method.needs:
        return Moments(loaded.block, {})
    try:
        return capture(
            loaded, data, needs=method.needs, progress=lambda done, total, where: progress(done, total, "capture")
        )
    except torch.OutOfMemoryError:
        longest = max(len(sequence) for sequence in data.sequences)
        raise ComputeFailed(
            f"{loaded.device} ran out of memory on a sequence of {longest} tokens.",
            hint="use shorter sequences or another device",
        ) from None


def _facts(
    options: ComputeOptions, method: Method, loaded: LoadedModel, data: CalibrationData, artifact_id: ArtifactId
) -> Facts:
    saw_data = bool(method.needs)
    device = loaded.device
    numerics = Numerics(
        forward_dtype=loaded.dtype,
        accumulate="float64",
        engine=Harness(name="transformers", version=version("transformers")),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )
    return Facts(
        artifact_id=artifact_id,
        model=loaded.block,
        recipe=options.recipe,
        calibration=data.facts() if saw_data else None,
        numerics=numerics if saw_data else None,
        created=options.created or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _require_verified(outcome: Outcome) -> Verified:
    if isinstance(outcome, Verified):
        return outcome
    raise ComputeFailed(
        f"the result failed its own verification: {why(outcome)}.", hint="nothing was written; try more or other text"
    )


def _notes(data: CalibrationData, method: Method) -> tuple[str, ...]:
    notes = []
    if data.tokens_used < data.tokens_requested:
        notes.append(f"the data ended after {data.tokens_used:,} of {data.tokens_requested:,} tokens.")
    if not method.needs:
        notes.append(f"{method.name} uses no data: the file was only counted for the tag.")
    elif data.tokens_used < ENOUGH_TOKENS:
        notes.append(f"{data.tokens_used:,} tokens are few: fits settle near {ENOUGH_TOKENS:,}.")
    return tuple(notes)
