"""What the configuration of a model says, without any weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.model_block import ModelBlock
from oscar_zoo.artifact.names import cached_model, safe_part
from oscar_zoo.errors import InvalidModel
from oscar_zoo.models import config_file, model_hub
from oscar_zoo.models.config_age import refuse_misread
from oscar_zoo.models.folder_code import refuse_chosen_code
from oscar_zoo.models.geometry import model_block
from oscar_zoo.models.load_failures import unread_config
from oscar_zoo.models.model_source import local_folder

# isort: split

from transformers import AutoConfig
from transformers.utils import cached_file


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model, read once.

    Attributes:
        parsed: as transformers reads it.
        block: its description.
        folder: where the `config.json` lies.
    """

    parsed: Any
    block: ModelBlock
    folder: Path

    @cached_property
    def written(self) -> config_file.ConfigFile:
        """The file as it is written; raises `InvalidModel` where transformers reads what is no
        JSON."""
        return config_file.ConfigFile.of_folder(self.folder)


def inspect_model(
    path_or_id: str, *, revision: str | None = None, model_id: str | None = None
) -> ModelBlock:
    """Describe a model from its `config.json` alone.

    Args:
        model_id: recorded as `id`; by default the Hugging Face id, or the name of the folder.
    """
    return read_model_config(path_or_id, revision, model_id).block


def read_model_config(path_or_id: str, revision: str | None, model_id: str | None) -> ModelConfig:
    """The configuration of a model; as `inspect_model`."""
    folder = local_folder(path_or_id)
    source: dict[str, Any] = {"local_files_only": True}
    if folder is None:
        source = {"revision": revision or "main", **model_hub.search_limits()}
    if folder:
        config_file.check_present(Path(path_or_id).expanduser())
    where = str(folder or path_or_id)
    cached = cached_model(folder) if folder else None
    if model_id is None:
        model_id = cached[0] if cached else safe_part(folder.name) if folder else path_or_id
    file = None
    try:
        file = Path(cached_file(where, config_file.NAME, **source))
        refuse_chosen_code(file.parent, model_id)
        config_file.read_config(file.parent)
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **source)
    except InvalidModel:
        raise
    except Exception as error:  # anybody may have written this file; its reader raises any type
        raise unread_config(path_or_id, file and file.parent, model_id, error) from None
    refuse_misread(config.get_text_config(decoder=True), model_id)
    block = model_block(
        config,
        model_id=model_id,
        revision=(cached and cached[1]) if folder else getattr(config, "_commit_hash", None),
        config_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    return ModelConfig(config, block, file.parent)
