"""Serve from Python, and compute the artifact first where nobody has one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.compute.obtain import obtain, plan_instead
from oscar_zoo.errors import OscarZooError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.artifacts import Artifact, open_pulled
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.params import clip_of
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.targets import (
    ComputeWish,
    ModelChoice,
    ModelTarget,
    NameTarget,
    model_to_compute,
    tell_of_folder,
)
from oscar_zoo.registry.trust import Trust
from oscar_zoo.serving.params import PORT, ServeParams
from oscar_zoo.serving.serve import RunningServer, start
from oscar_zoo.verb import checked


def serve(
    target: str | Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    port: int = PORT,
    expose: str | None = None,
    api_key_file: str | Path | None = None,
    require_key: bool = False,
    allow_origin: Sequence[str] = (),
    engine_api: bool = False,
    clip: tuple[float, float] | Clip | None = None,
    drafts: str | None = None,
    engine: str = "sglang",
    flags: Sequence[str] = (),
    device: str | None = None,
    timeout: float = 1800.0,
    hubs: str | Sequence[str] | None = None,
    offline: bool = False,
    compute: bool = False,
    observer: Observer = SILENT,
) -> RunningServer:
    """Serve a model with an INT2 cache over the OpenAI-compatible API.

    The server ends with the block when the result is used as a context manager, and with this
    process in any case.

    Args:
        target: name of an artifact, its folder, or the folder of a model.
        clip: clip ratios of keys and values in place of the recipe's.
        drafts: where drafts come from: `auto`, `mtp` or `ngram`.
        engine: `sglang` or `vllm`.
        flags: flags of the engine, such as `--tp=2` of SGLang.
        hubs: hubs to use in place of the configured ones.
        observer: hears how the start goes on.

    The other arguments are the options of `oscar-zoo serve`; see `ServeParams`.
    """
    given = {**locals(), "clip": clip_of(clip), "allow_origin": tuple(allow_origin)}
    given |= {
        "flags": tuple(flags),
        "hubs": (hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
    }
    del given["observer"]
    return start(checked(ServeParams, given), observer, computed)


def computed(
    params: ServeParams,
    target: ModelTarget | NameTarget,
    model: ModelChoice | None,
    error: OscarZooError,
    observer: Observer,
) -> Artifact:
    """An artifact that is computed because a search gave `error`, which is raised where that is not
    wished or possible."""
    choice = model_to_compute(target, error, model)
    if choice is None:
        raise error
    tell_of_folder(target, error)
    choice.check_can_be_had(params.command_line(model="FOLDER"))
    wish = ComputeWish(
        compute=params.compute,
        ask=params.ask,
        calib_data=params.calib_data,
        device=None if params.print_only else params.device,  # --print names the server's
        revision=params.revision,
        offline=Sources(params.hubs, offline=params.offline).offline,
        to_serve=True,
    )
    plan = plan_instead(choice, wish, error, observer, again=params.command_line)
    pulled, _ = obtain(plan, Trust(lock=PinFile.of_project(), write_lock=False), observer)
    folder_model = target.choice if isinstance(target, ModelTarget) else None
    return open_pulled(pulled, folder_model, observer)
