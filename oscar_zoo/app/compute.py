"""Calibrate a model and fit a rotation for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.app.compute_request import ComputeRequest
from oscar_zoo.app.early_checks import check_device, check_model
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.observer import SILENT, Note, Observer, phase_progress
from oscar_zoo.registry.arguments import clip_of, model_text

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.compute.estimate import Estimate
    from oscar_zoo.compute.job import ComputeOptions, ComputeResult
    from oscar_zoo.models.config_file import ConfigFile
    from oscar_zoo.models.loading import Dtype
    from oscar_zoo.models.model_source import ModelConfig
    from oscar_zoo.registry.targets import ModelChoice

CALIB_TOKENS = 16_384
"""Tokens to calibrate on when neither the request nor the model's recipe says how many."""


def compute_artifact(
    model: str | Path,
    *,
    calib_data: str | Path = ComputeRequest.calib_data,
    calib_tokens: int | None = None,
    seq_len: int | None = None,
    method: str = ComputeRequest.method,
    clip: tuple[float, float] | Clip | None = None,
    group_size: int | None = None,
    device: str | None = None,
    dtype: Dtype = ComputeRequest.dtype,
    stream_weights: bool | None = None,
    output: str | Path | None = None,
    force: bool = False,
    resume: bool | None = None,
    seed: int | None = None,
    chat_template: bool | None = None,
    allow_overlap: bool = False,
    allow_poor: bool = False,
    fast: bool = False,
    tune: bool = True,
    bits: float | Literal["auto"] | None = None,
    max_loss: float | None = None,
    revision: str | None = None,
    model_id: str | None = None,
    observer: Observer = SILENT,
) -> ComputeResult:
    """Calibrate a model, fit a rotation, and write it as a verified artifact.

    Args:
        model: a local folder, a name of the zoo, or a hub id such as `Qwen/Qwen3-8B`. A `Path` is
            always a folder.
        calib_data: text to calibrate on: a text or JSONL file, a folder of such files, a text known
            by name, or a Hugging Face dataset `ORG/NAME[@REV][:CONFIG][:SPLIT][#FIELD]`.
        calib_tokens: tokens to read; `None` for the number in the model's recipe, else 16,384.
        seq_len: tokens of a sequence; `None` for the recipe's, else up to 4,096.
        method: how to fit; `auto` measures all methods on held-out text and keeps the best.
        clip: clip ratios of keys and values to record for serving; `None` fits them with `auto`,
            and otherwise takes the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        output: the artifact's folder; `None` for `./<Model>/<tag>`. Moments and report are written
            beside it.
        force: replace an artifact that is already in the folder.
        resume: continue from what an interrupted call with the same arguments left; `None` where
            it left something.
        seed: shuffles the documents; `None` keeps their order.
        chat_template: render text as chat, or chats as text; `None` decides by the data.
        allow_overlap: calibrate although the text holds questions of an evaluation set.
        allow_poor: write a result that fails its quality gates.
        fast: with `auto`, choose by errors of attention alone, without perplexity and recall.
        tune: with `auto`, also try `wush-tuned`, which reads the text once more.
        bits: average bits of an element at most, scales and offsets included: layers and sides
            where it gains most get codes of 4 bits. 4 gives all codes 4 bits, and `auto` the
            fewest with the quality of BF16. `None` for codes of 2 bits everywhere.
        max_loss: in place of `bits`: the fewest with at most this rise of perplexity, in percent.
        revision: commit, branch or tag of a model on a hub.
        model_id: identity to record for a local folder, `ORG/NAME`.
        observer: hears of progress and remarks.

    Returns:
        The artifact: `path`, `manifest`, `moments`, `report`, `notes` and more.

    Raises:
        MissingDependency: torch or transformers is not installed.
        UsageError: arguments that make no sense together, or data that is no text.
        NotFoundError: there is no such model or data.
        UnsupportedModel: the model has attention that this version cannot handle.
        OutputExists: the folder holds an artifact already.
        NotEnoughMemory: the model is larger than the device.
        ComputeFailed: the result failed its verification or its gates.
    """
    request = ComputeRequest(
        model=model_text(model),
        calib_data=str(calib_data),
        calib_tokens=calib_tokens,
        seq_len=seq_len,
        method=method,
        clip=clip_of(clip),
        group_size=group_size,
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        output=None if output is None else Path(output),
        force=force,
        resume=resume,
        seed=seed,
        chat_template=chat_template,
        allow_overlap=allow_overlap,
        allow_poor=allow_poor,
        fast=fast,
        tune=tune,
        bits=bits,
        max_loss=max_loss,
        revision=revision,
        model_id=model_id,
    )
    return compute(request, observer)


def compute(request: ComputeRequest, observer: Observer = SILENT) -> ComputeResult:
    """Calibrate a model, fit a rotation, and write it as a verified artifact.

    Returns:
        The artifact; its `notes` hold every remark, also those that the observer was told at once.
    """
    from oscar_zoo.compute.folder import check_place
    from oscar_zoo.engines.requirements import require_compute
    from oscar_zoo.registry.targets import check_model_id, parse_model

    require_compute()
    choice = parse_model(request.model, observer)
    choice.check_can_be_had("oscar-zoo compute FOLDER")
    if request.model_id is not None:
        check_model_id(request.model_id)
    check_place(request.output, force=request.force)
    options, model = options_of(request, choice)
    refused = serving_refusal(model.written, model.block.id)
    early = (not_served_note(refused),) if refused is not None else ()
    cost = None
    if observer is not SILENT:
        from oscar_zoo.compute.estimate import estimate

        cost = estimate(options, model)
    return run(options, observer, cost=cost, notes=early)


def options_of(request: ComputeRequest, choice: ModelChoice) -> tuple[ComputeOptions, ModelConfig]:
    """Everything that `request` leaves open is decided here: recipe, device and amounts."""
    from oscar_zoo.compute.data import check_exists
    from oscar_zoo.registry.recipe import serving_recipe

    check_exists(request.calib_data)  # a missing file is named before a hub is asked for the model
    check_device(request.device)
    check_model(choice.source, request.revision)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.compute.options import ComputeOptions
    from oscar_zoo.compute.width_wish import check_wish, width_wish
    from oscar_zoo.models.memory import pick_device
    from oscar_zoo.models.model_source import read_model_config
    from oscar_zoo.models.weight_files import check_model_folder

    model = read_model_config(choice.source, request.revision, request.model_id or choice.model_id)
    if Path(choice.source).is_dir():
        check_model_folder(Path(choice.source).absolute())
    recipe = serving_recipe(choice.recipe, model.block.geometry)
    device = pick_device(request.device, several=True)
    usual = choice.recipe.calibration if choice.recipe else None
    recipe = recipe.override(clip=request.clip, group_size=request.group_size)
    wish = width_wish(request.bits, request.max_loss)
    check_wish(wish, recipe, model.block)
    options = ComputeOptions(
        model=choice.source,
        model_id=model.block.id,
        model_name=choice.name,
        revision=request.revision,
        calib_data=request.calib_data,
        calib_tokens=request.calib_tokens or (usual.tokens if usual else CALIB_TOKENS),
        seq_len=request.seq_len or (usual.sequence_length if usual else None),
        recipe=recipe,
        method=request.method,
        output_dir=request.output,
        device=device,
        dtype=request.dtype,
        stream_weights=request.stream_weights,
        force=request.force,
        resume=request.resume,
        seed=request.seed,
        chat_template=request.chat_template,
        allow_overlap=request.allow_overlap,
        allow_poor=request.allow_poor,
        fast=request.fast,
        tune=request.tune,
        widths=wish,
        raises=request.bits is None and request.max_loss is None,
        fixed_clip=request.clip is not None,
    )
    return options, model


def run(
    options: ComputeOptions,
    observer: Observer,
    *,
    cost: Estimate | None = None,
    notes: tuple[Note, ...] = (),
) -> ComputeResult:
    """Compute with `options` and tell the observer of the first process how far it is.

    Args:
        notes: remarks to make when the work begins; the result holds them too.
    """
    from oscar_zoo.compute.job import compute_artifact
    from oscar_zoo.compute.phases import expected_phases

    observer.begin(cost.phases if cost else expected_phases(options), timed=cost is not None)
    told: list[str] = []
    for note in notes:
        told.append(note.text)
        observer.note(note)
    result = compute_artifact(
        options,
        progress=phase_progress(observer),
        tell=partial(_remark, observer, told),
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


def not_served_note(error: UnsupportedModel) -> Note:
    """The remark, made before time is spent, that `serve` refuses the model with `error`."""
    text = f"oscar-zoo serve will refuse this model: {error.message}"
    return Note("compute.not_served", text, {"reason": error.message})


def _remark(observer: Observer, told: list[str], text: str) -> None:
    told.append(text)
    observer.note(Note("compute.remark", text))
