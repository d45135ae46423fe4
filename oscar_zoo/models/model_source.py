"""Where transformers finds a model, what its configuration says, and which class runs it.

Every module of this room that imports transformers imports this one first. It reports a missing
torch or transformers, and it keeps an unsuitable torchvision from breaking the import. What
transformers raises for a file of anybody is no public type, and becomes an error of ours.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.names import cached_model, safe_part
from oscar_zoo.errors import (
    InvalidModel,
    MissingDependency,
    NetworkError,
    OscarZooError,
    UnsupportedModel,
)
from oscar_zoo.models import (
    config_file,
    model_hub,
    torchvision_ops,  # noqa: F401  (transformers imports torchvision)
)
from oscar_zoo.models.config_file import ConfigFile, refuse_chosen_code
from oscar_zoo.models.geometry import (
    STOCK,
    experts,
    float8_block,
    model_block,
    refuse_misread,
    refuse_other_caches,
)

try:
    import torch
    import transformers
    from transformers import (  # fails without a usable torch
        CONFIG_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        dynamic_module_utils,
    )
    from transformers.utils import cached_file
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise MissingDependency.for_extra(error.name or "transformers", "compute") from error

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # it never asks whether code of a model may run

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What a file of transformers imports when its attention can be watched and replaced."""


def local_folder(path_or_id: str) -> Path | None:
    """The local folder that `path_or_id` names, or `None` for a Hugging Face id `org/name`."""
    path = Path(path_or_id).expanduser()
    is_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path_or_id)
    if is_id and not path.exists():
        return None
    config_file.check_folder(path)
    return path.resolve()


def source_options(path_or_id: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """The first argument of `from_pretrained`, and the keywords that limit where it looks."""
    folder = local_folder(path_or_id)
    if folder is not None:
        return str(folder), {"trust_remote_code": False, "local_files_only": True}
    limits = {"revision": revision or "main", **model_hub.search_limits()}
    return path_or_id, {"trust_remote_code": False, **limits}


@contextmanager
def silent_transformers() -> Iterator[None]:
    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def unusable(where: str, what: str, error: Exception) -> OscarZooError:
    lines = [*filter(None, map(str.strip, str(error).splitlines())), type(error).__name__]
    cause = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if Path(where).is_dir():
        hint = "it needs config.json, *.safetensors and a tokenizer"
    elif (trouble := model_hub.unreachable()) is not None:
        return model_hub.incomplete(where, trouble)
    elif "connect" in cause or "offline" in cause:
        hint = "check the network, or give a local folder"
        return NetworkError(f"cannot load {where}: {cause[:300]}", hint=hint)
    elif model_hub.offers_only_gguf(where):
        return config_file.gguf_weights(where)
    else:
        hint = "check its name, the revision and the network, or give a local folder"
    return InvalidModel(f"cannot load {where}: {what}: {cause[:300]}", hint=hint)


def unread_config(
    where: str, folder: Path | None, model_id: str, error: Exception
) -> OscarZooError:
    """The error for a `config.json` that could not be read; `folder` has it, if it was found."""
    told = unusable(where, "its config.json", error)
    if folder is None:
        return told
    written = ConfigFile.of_folder(folder)
    kind = getattr(written, "model_type", None)
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        # a reason that holds for every release, if there is one
        refuse_other_caches(written, written.get_text_config(), model_id)
        absent = f"is of a model type that transformers {transformers.__version__} does not have"
        message = f"{model_id} ({kind}) {absent}, and code that ships with a model is never run."
        return UnsupportedModel(message, hint=STOCK)
    return told


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model, read once: as transformers reads it, its description, and where
    the `config.json` lies."""

    parsed: Any
    block: ModelBlock
    folder: Path

    @property
    def readable(self) -> ModelBlock:
        """The description, of a model whose weights this package reads."""
        float8_block(self.parsed, self.block.id)
        return self.block

    @cached_property
    def written(self) -> config_file.ConfigFile:
        """The file as it is written; raises `InvalidModel` where transformers reads what is no
        JSON."""
        return config_file.ConfigFile.of_folder(self.folder)


def inspect_model(
    path_or_id: str, *, revision: str | None = None, model_id: str | None = None
) -> ModelBlock:
    """Describe a model from its `config.json` alone. `model_id` is recorded as `id`; by default it
    is the Hugging Face id, or the name of the folder."""
    return read_model_config(path_or_id, revision, model_id).block


def read_model_config(path_or_id: str, revision: str | None, model_id: str | None) -> ModelConfig:
    folder = local_folder(path_or_id)
    source: dict[str, Any] = {"revision": revision or "main", **model_hub.search_limits()}
    if folder:
        source = {"local_files_only": True}
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


def outline(config: Any, model_id: str) -> Any:
    """The model with unread weights; call it with the device `meta`. Models with images are those
    of text and image together, and get text only."""
    kind = type(config)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if kind in auto._model_mapping:
            # transformers chooses, and not the file, which could name a kernel of a hub
            config._experts_implementation = None
            model = auto.from_config(config, trust_remote_code=False, attn_implementation=None)
            _check_attention(model, model_id)
            return model
    message = f"transformers runs no language model for {model_id} ({config.model_type})."
    raise UnsupportedModel(message, hint="choose a model that transformers runs")


def _check_attention(model: Any, model_id: str) -> None:
    files = {type(module).__module__ for module in model.modules()}
    if not any(hasattr(sys.modules.get(file), INTERFACE) for file in files):
        own = "computes attention in code of its own, which nothing can watch"
        hint = "choose a model that transformers runs through its attention interface"
        raise UnsupportedModel(f"{model_id} ({type(model).__name__}) {own}.", hint=hint)


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


def model_size(config: Any, model_id: str) -> ModelSize | None:
    """Parameters of the model of a configuration, all of them and those that one token uses: a
    token of a mixture of experts uses only some. `None` where the class cannot be built."""
    try:
        with torch.device("meta"), silent_transformers():
            model = outline(config, model_id)
    except Exception:  # the size is only information; loading the model reports what is wrong
        return None
    text = config.get_text_config(decoder=True)
    # a token uses `share` of the `number` experts; a dense model counts as one expert of one
    share = getattr(text, "num_experts_per_tok", None) or 1
    number = experts(text) or share
    sizes = [
        (parameter.numel(), ".experts." in name) for name, parameter in model.named_parameters()
    ]
    idle = sum(size for size, of_expert in sizes if of_expert) * (number - share) // number
    total = sum(size for size, _ in sizes)
    return ModelSize(total, total - idle)
