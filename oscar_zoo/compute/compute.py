"""Calibrate a model and fit a rotation for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.compute.params import ComputeCommand, ComputeParams
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models import hardware
from oscar_zoo.models.config_file import ConfigFile, read_config
from oscar_zoo.models.model_hub import check_fetchable
from oscar_zoo.observer import SILENT, Note, Observer, phase_progress
from oscar_zoo.registry.params import clip_of, model_text
from oscar_zoo.verb import python_call

if TYPE_CHECKING:
    from oscar_zoo.compute.estimate import Estimate
    from oscar_zoo.compute.options import Job
    from oscar_zoo.compute.outcome import ComputeResult
    from oscar_zoo.models.model_source import ModelConfig
    from oscar_zoo.registry.targets import ModelChoice

CALIB_TOKENS = 16_384
"""Tokens to calibrate on when neither the parameters nor the model's recipe say how many."""
ALL_GPUS = "auto"
"""The device that means all GPUs, then main memory."""


def run(params: ComputeParams, observer: Observer = SILENT) -> ComputeResult:
    """Calibrate a model, fit a rotation, and write it as a verified artifact.

    Returns:
        The artifact: `path`, `manifest`, `moments`, `report` and more; its `notes` hold every
            remark, also those that the observer was told at once.
    """
    from oscar_zoo.compute.folder import check_place
    from oscar_zoo.engines.requirements import require_compute
    from oscar_zoo.registry.targets import check_model_id, parse_model

    params = params.given() if isinstance(params, ComputeCommand) else params
    observer = params.observer or observer
    require_compute()
    choice = parse_model(model_text(params.model), observer)
    choice.check_can_be_had("oscar-zoo compute FOLDER")
    if params.model_id is not None:
        check_model_id(params.model_id)
    check_place(None if params.output is None else Path(params.output), force=params.force)
    job, model = plan_job(params, choice)
    refused = serving_refusal(model.written, model.block.id)
    cost = None
    if observer is not SILENT:
        from oscar_zoo.compute.estimate import estimate

        cost = estimate(job, model)
    return run_job(job, observer, cost=cost, notes=not_served_notes(refused))


compute_artifact = python_call(ComputeParams, run)


def plan_job(params: ComputeParams, choice: ModelChoice) -> tuple[Job, ModelConfig]:
    """Everything that `params` leave open is decided here: recipe, device and amounts."""
    from oscar_zoo.compute.data.calibration import check_source
    from oscar_zoo.registry.recipe import serving_recipe

    check_source(params.calib_data)  # a missing file is named before a hub is asked for the model
    check_device(params.device)
    check_model(choice.source, params.revision)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.compute.options import Job, check_wish
    from oscar_zoo.models.memory import pick_device
    from oscar_zoo.models.model_source import read_model_config
    from oscar_zoo.models.weight_files import check_model_folder

    model = read_model_config(choice.source, params.revision, params.model_id or choice.model_id)
    if Path(choice.source).is_dir():
        check_model_folder(Path(choice.source).absolute())
    recipe = serving_recipe(choice.recipe, model.readable.geometry)
    usual = choice.recipe.calibration if choice.recipe else None
    decided = {
        "model": choice.source,
        "model_id": model.block.id,
        "model_name": choice.name,
        "calib_tokens": params.calib_tokens or (usual.tokens if usual else CALIB_TOKENS),
        "seq_len": params.seq_len or (usual.sequence_length if usual else None),
        "recipe": recipe.override(clip=clip_of(params.clip), group_size=params.group_size),
        "output": None if params.output is None else Path(params.output),
        "device": pick_device(params.device, several=True),
        "geometry": model.block.geometry,
    }
    job = Job(**(vars(params) | decided))
    check_wish(job.wish, job.recipe, model.block)
    job.sequence_length(model.block)
    return job, model


def run_job(
    job: Job, observer: Observer, *, cost: Estimate | None = None, notes: tuple[Note, ...] = ()
) -> ComputeResult:
    """Do a job and tell the observer how far it is; `notes` are made when the work begins, and the
    result holds them too."""
    from oscar_zoo.compute.estimate import expected_phases
    from oscar_zoo.compute.job import compute_artifact

    told: list[str] = []

    def tell(note: Note) -> None:
        told.append(note.text)
        observer.note(note)

    observer.begin(cost.phases if cost else expected_phases(job), timed=cost is not None)
    for note in notes:
        tell(note)
    result = compute_artifact(
        job, progress=phase_progress(observer), tell=lambda text: tell(Note("compute.remark", text))
    )
    observer.begin((), timed=False)
    return replace(result, notes=tuple(dict.fromkeys((*told, *result.notes))))


def serving_refusal(config: ConfigFile, model_id: str) -> UnsupportedModel | None:
    """Why `oscar-zoo serve` refuses a model, as far as its `config.json` tells; `None` when it does
    not."""
    from oscar_zoo.engines.sglang.refusals import check_config

    try:
        check_config(config, model_id)
    except UnsupportedModel as error:
        return error
    return None


def not_served_notes(error: UnsupportedModel | None) -> tuple[Note, ...]:
    """The remark, made before time is spent, that `serve` refuses the model with `error`."""
    if error is None:
        return ()
    text = f"oscar-zoo serve will refuse this model: {error.message}"
    return (Note("compute.not_served", text, {"reason": error.message}),)


def check_model(source: str, revision: str | None = None) -> None:
    """Refuse a folder without a model, and a model that cannot be fetched now, before torch and
    transformers are imported."""
    check_fetchable(source, revision)
    if Path(source).is_dir():
        read_config(Path(source))


def check_device(name: str | None) -> None:
    """Refuse what is not the name of a device, and a GPU where torch is a build for CPUs, before
    torch is imported."""
    if name is not None and name != ALL_GPUS and hardware.parse_device(name)[0] == "cuda":
        hardware.check_build()
