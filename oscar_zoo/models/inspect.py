"""What the configuration of a model says: its geometry and its size, without any weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.model_block import ModelBlock
from oscar_zoo.errors import InvalidModel, UnsupportedModel
from oscar_zoo.models import config_file, model_hub
from oscar_zoo.models.config_age import refuse_misread, written_by_newer
from oscar_zoo.models.geometry import model_block
from oscar_zoo.models.model_source import (
    local_folder,
    silent_transformers,
    source_options,
    unusable,
)
from oscar_zoo.models.other_caches import refuse_other_caches

# isort: split

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import cached_file

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


def inspect_model(
    path_or_id: str, *, revision: str | None = None, model_id: str | None = None
) -> ModelBlock:
    """Describe a model from its `config.json` alone.

    Args:
        path_or_id: a local folder or a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id.
        model_id: recorded as `id`; by default the Hugging Face id, or the name of the folder.

    Raises:
        PathNotFound: there is no such folder.
        InvalidModel: the folder or repository has no readable configuration.
        UnsupportedModel: see `geometry.model_block` and `config_age.refuse_misread`.
    """
    return read_model_config(path_or_id, revision, model_id)[1]


def config_folder(path_or_id: str, *, revision: str | None = None) -> Path:
    """The folder with the `config.json` of a model, fetched when it is not on this machine.

    Raises:
        PathNotFound, InvalidModel: as `inspect_model`.
        NetworkError: Hugging Face cannot be reached.
    """
    folder = local_folder(path_or_id)
    if folder is not None:
        return folder
    try:
        return Path(
            cached_file(
                path_or_id,
                config_file.NAME,
                revision=revision or "main",
                **model_hub.search_limits(),
            )
        ).parent
    except Exception as error:  # the error types of this call are not public
        raise unusable(path_or_id, "its config.json", error) from None


def read_model_config(
    path_or_id: str, revision: str | None, model_id: str | None
) -> tuple[Any, ModelBlock]:
    """The configuration as transformers reads it, and its description; as `inspect_model`."""
    folder = local_folder(path_or_id)
    source: dict[str, Any] = {"local_files_only": True}
    if folder is None:
        source = {"revision": revision or "main", **model_hub.search_limits()}
    if folder and not (folder / config_file.NAME).is_file():
        raise InvalidModel(
            f"{path_or_id} has no config.json.", hint="name the folder of a Hugging Face checkpoint"
        )
    where = str(folder or path_or_id)
    model_id = model_id or (folder.name if folder else path_or_id)
    file = None
    try:
        file = Path(cached_file(where, config_file.NAME, **source))
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **source)
    except Exception as error:  # anybody may have written this file; its reader raises any type
        if file is not None:
            _refuse_unknown(file, model_id)
            newer = written_by_newer(config_file.ConfigFile.of_folder(file.parent))
            if newer is not None:
                raise InvalidModel(
                    unusable(path_or_id, "its config.json", error).message,
                    hint=f"transformers {newer} wrote it: update transformers",
                ) from None
        raise unusable(path_or_id, "its config.json", error) from None
    refuse_misread(config.get_text_config(decoder=True), model_id)
    return config, model_block(
        config,
        model_id=model_id,
        revision=None if folder else getattr(config, "_commit_hash", None),
        config_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )


def _refuse_unknown(file: Path, model_id: str) -> None:
    """Refuse a model of a type that transformers does not have.

    Raises:
        UnsupportedModel: with a reason that holds for every release, if there is one.
    """
    written = config_file.ConfigFile.of_folder(file.parent)
    kind = getattr(written, "model_type", None)
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return
    refuse_other_caches(written, written.get_text_config(), model_id)
    raise UnsupportedModel(
        f"{model_id} ({kind}) is of a model type that transformers {transformers.__version__} does"
        " not have, and code that ships with a model is never run.",
        hint="update transformers, or serve it with SGLang alone, without an INT2 cache",
    )


def model_size(path_or_id: str, *, revision: str | None = None) -> ModelSize | None:
    """Count parameters from `config.json` alone.

    The model is built on the meta device, so its weights take no memory.

    Returns:
        The size, or `None` when this model class cannot be built that way.
    """
    where, source = source_options(path_or_id, revision)
    try:
        config = AutoConfig.from_pretrained(where, **source)
        with torch.device("meta"), silent_transformers():
            model = outline(config, path_or_id)
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
