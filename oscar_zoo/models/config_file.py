"""A model's `config.json` as it is written, without the defaults of any library, and what in its
folder would choose code. Needs no torch.

It is enough to refuse a model or an artifact within milliseconds. A value that the file leaves out
is unknown here. Code that ships with a model is never run. That does not keep transformers and
SGLang from running what a file names: an attention implementation `org/name` is a kernel, which is
fetched and run where the package `kernels` is installed, and a tokenizer class may be any name of
transformers. Such files are refused by name, before a library reads them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_file, read_start, sha256_hex
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import InvalidModel, MalformedFile, PathNotFound, UnsupportedModel, UsageError
from oscar_zoo.models import model_hub
from oscar_zoo.models.geometry import (
    PER_LAYER,
    float8_block,
    layer_kinds,
    model_block,
    no_full_attention,
    only_windows,
    refuse_misread,
    refuse_other_caches,
)
from oscar_zoo.models.model_hub import kept_config

NAME = "config.json"
GGUF = b"GGUF"
"""What such a file of weights begins with."""
GENERATION_NAME = "generation_config.json"

DIVIDED = frozenset(
    "arcee granite granitemoe llama mistral mixtral olmo2 olmoe qwen2 qwen2_moe smollm3".split()
)
"""Types whose head size is `hidden_size / num_attention_heads` unless the file says it; others have
a default."""
_Kind = tuple[str, Callable[[Any], bool]]


def _up_to(most: int) -> _Kind:
    return f"1 to {most:,}", lambda value: type(value) is int and 0 < value <= most


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


KINDS: dict[str, _Kind] = {
    "model_type": ("a string", lambda value: isinstance(value, str)),
    **dict.fromkeys(["architectures", "layer_types"], ("a list of strings", _texts)),
    **dict.fromkeys(
        "text_config rope_parameters rope_scaling quantization_config compression_config".split(),
        ("an object", lambda value: isinstance(value, dict)),
    ),
    **dict.fromkeys(
        ["head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window"],
        ("a whole number", lambda value: type(value) is int),
    ),
    **dict.fromkeys(["hidden_size", "vocab_size"], _up_to(2**31 - 1)),
    "num_hidden_layers": _up_to(10_000),
}
"""What some reader takes for granted of a value, in words and as a check. `null` is always good."""

FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
MAX_BYTES = 16 << 20
_AGAIN = "download the model again"

IMPLEMENTATIONS = frozenset(
    f"{prefix}{part}_implementation{suffix}"
    for part in ("attn", "experts")
    for prefix, suffix in (("", ""), ("_", ""), ("_", "_internal"))
)
"""Keys that choose how a part of the model is computed."""

_CLASS = r"(?!Auto|Rag)[A-Z][A-Za-z0-9_]{0,80}"
CLASSES = {
    "tokenizer_class": re.compile(_CLASS + r"(Tokenizer(Fast)?|Backend)"),
    "processor_class": re.compile(_CLASS + "Processor"),
    "image_processor_type": re.compile(_CLASS + r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?"),
    "feature_extractor_type": re.compile(_CLASS + r"(FeatureExtractor|Processor)(Fast)?"),
    "video_processor_type": re.compile(_CLASS + "VideoProcessor"),
}
"""Keys that name a class of transformers, and the names that such a class has."""


class ConfigFile:
    """The values of a file as attributes: the same code then reads this file and the configurations
    of transformers."""

    def __init__(self, values: dict[str, Any], data: bytes = b"") -> None:
        self._values, self._data = dict(values), data

    @classmethod
    def of_folder(cls, folder: Path) -> ConfigFile:
        check_present(folder)
        path = folder / NAME
        try:
            # resolved: files in the cache of a hub's client are links
            data = read_file(path.resolve(), max_bytes=strict_json.MAX_BYTES)
            # Published hybrids with Mamba layers say that a step has no limit.
            config = strict_json.loads(data, what=str(path), infinite=True)
        except MalformedFile as error:
            raise InvalidModel(error.message, hint=_AGAIN) from None
        if not isinstance(config, dict):
            message = f"{path} is not a model's configuration."
            raise InvalidModel(message, hint="name the folder of a checkpoint")
        _check_kinds(config, path)
        return cls(config, data)

    @classmethod
    def kept(cls, source: str, revision: str | None = None) -> ConfigFile | None:
        """That of a model on this machine, or `None`; no hub is asked."""
        folder = Path(source)
        here = os.path.isfile(folder / NAME)  # noqa: PTH113 (any text: no errors)
        place = folder if here else kept_config(source, revision)
        if place is None:
            return None
        refuse_chosen_code(place, source)
        return cls.of_folder(place)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def as_written(self) -> dict[str, Any]:
        return self._values

    @property
    def file_sha256(self) -> str:
        return sha256_hex(self._data)

    def get_text_config(self, decoder: bool = True) -> ConfigFile:
        text = self._values.get("text_config")
        return ConfigFile(text) if isinstance(text, dict) else self


def check_folder(path: Path) -> None:
    """Raise where a model's folder is wanted, and `path` is nothing, or a file."""
    if not path.exists():
        raise PathNotFound.for_path(path_text(path), "model folder")
    if not path.is_dir():
        message = f"{path_text(path)} is a file, not a model folder."
        error = UsageError(message, hint=f"give the folder that holds {NAME}")
        raise gguf_refusal(path) or error


def check_present(folder: Path) -> None:
    """Raise where `folder` holds no model."""
    if not (folder / NAME).is_file():
        check_folder(folder)
        hint = "name the folder of a Hugging Face checkpoint"
        error = PathNotFound(f"{path_text(folder)} has no {NAME}.", hint=hint)
        raise gguf_refusal(folder) or error


def gguf_refusal(path: Path) -> UnsupportedModel | None:
    """The error for a GGUF file, or for a folder whose only weights are such files."""
    if path.is_file():
        found = read_start(path.resolve(), len(GGUF)) == GGUF
    else:
        found = any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return gguf_weights(path_text(path)) if found else None


def gguf_weights(shown: str) -> UnsupportedModel:
    # No converter is named: transformers gives some of these models another tokenizer than theirs.
    return UnsupportedModel(
        f"{shown} holds quantized weights in GGUF, which is not read.",
        hint="fetch the model that its page calls the base model: hf download ORG/NAME --local-dir"
        " ./NAME",
    )


def read_config(folder: Path) -> dict[str, Any]:
    return ConfigFile.of_folder(folder).as_written


def _check_kinds(config: dict[str, Any], path: Path) -> None:
    for name, (kind, good) in KINDS.items():
        value = config.get(name)
        if value is not None and not good(value):
            message = f"{name} in {path} must be {kind}, and is {str(value)[:40]}."
            raise InvalidModel(message, hint=_AGAIN)
    if "text_config" in config and config["text_config"] is not None:
        _check_kinds(config["text_config"], path)


def says_all(file: ConfigFile) -> bool:
    """Whether the file alone gives the geometry, without the defaults of a transformers class."""
    text = file.get_text_config()
    names = ["num_attention_heads", "num_key_value_heads", "head_dim"]
    if layer_kinds(text) is None:
        names.append("num_hidden_layers")
    kind = str(getattr(text, "model_type", ""))
    if kind.startswith("gemma4") and not isinstance(getattr(text, PER_LAYER, None), dict):
        names.append("global_head_dim")  # it has a default of its own
    given = {name for name in names if isinstance(getattr(text, name, None), int)}
    if getattr(file, "model_type", None) in DIVIDED:
        given.add("head_dim")
        slides = isinstance(getattr(text, "sliding_window", None), int)
        if slides and getattr(text, "use_sliding_window", None) is not False:
            return layer_kinds(text) is not None and given == set(names)  # else the class knows
    return given == set(names)


def describe(file: ConfigFile, model_id: str) -> ModelBlock:
    config, digest = ConfigFile({"model_type": "unknown"} | file.as_written), file.file_sha256
    return model_block(config, model_id=model_id, revision=None, config_sha256=digest)


def check_cache(file: ConfigFile, model_id: str) -> None:
    """Refuse a model whose cache no command works with, in the sentence of `compute` and `eval`."""
    text = file.get_text_config()
    refuse_other_caches(file, text, model_id)
    refuse_misread(text, model_id)
    if only_windows(text):
        raise no_full_attention(text, model_id)


def unread_weights(source: str) -> UnsupportedModel | None:
    """Why `compute` and `eval` refuse a model on this machine by the format of its weights."""
    try:
        if (config := ConfigFile.kept(source)) is not None:
            float8_block(config, Path(source).name)
    except UnsupportedModel as error:
        return error
    return None


def refuse_chosen_code(folder: Path, where: str) -> None:
    for name in FILES:
        for key, value in _pairs(folder / name, where):
            if key in IMPLEMENTATIONS and (kernel := _kernel_in(value)) is not None:
                raise InvalidModel(
                    f"{name} of {where} asks for the kernel {kernel[:80]!a} of a hub as {key}:"
                    " code that a model chooses is never run.",
                    hint=f"remove {key} from {name}",
                )
            named = CLASSES.get(key)
            if named is not None and isinstance(value, str) and not named.fullmatch(value):
                message = f"{name} of {where} names the {key} {value[:80]!a}, which is none."
                hint = "download the model again, from a publisher whom you trust"
                raise InvalidModel(message, hint=hint)
            if key == "configuration_files" and name == "config.json":
                message = f"{name} of {where} sends readers to other files by {key}."
                raise InvalidModel(message, hint=f"remove {key} from {name}")


def _kernel_in(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        return next((found for one in value if (found := _kernel_in(one)) is not None), None)
    return value if isinstance(value, str) and ("/" in value or "\\" in value) else None


def _pairs(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    """Every key of a JSON file with its value, at any depth; what is no JSON is left to its
    reader."""
    try:
        # resolved: files in the cache of a hub's client are links
        data = read_file(path.resolve(), max_bytes=MAX_BYTES)
        waiting = [json.loads(data, object_pairs_hook=tuple)]
    except PathNotFound:
        return
    except MalformedFile as error:
        raise InvalidModel(error.message, hint=_AGAIN) from None
    except RecursionError:
        raise InvalidModel(
            f"{path.name} of {where} nests too deeply.", hint="download the model again"
        ) from None
    except ValueError:
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple):
            for key, inner in value:
                yield key, inner
                waiting.append(inner)
        elif isinstance(value, list):
            waiting += value


def read_generation_config(source: str, revision: str | None = None) -> dict[str, Any]:
    path = Path(source) / GENERATION_NAME if Path(source).is_dir() else _of_hub(source, revision)
    if path is None or not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise InvalidModel(f"{path} is no JSON object.", hint="fetch the model again")
    return value


def _of_hub(source: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(
            source, GENERATION_NAME, revision=revision or "main", **model_hub.search_limits()
        )
    except OSError:  # the repository has none, or it cannot be had: then the defaults are taken
        return None
    return Path(found) if found else None


def geometry_of_folder(
    folder: Path, model_id: str | None = None, config: ConfigFile | None = None
) -> Geometry:
    """The shape of the KV cache of the model in `folder`, which messages call `model_id`."""
    model_id = model_id or folder.resolve().name
    config = config or ConfigFile.of_folder(folder)
    if says_all(config) or importlib.util.find_spec("transformers") is None:
        return describe(config, model_id).geometry
    from oscar_zoo.models.model_source import inspect_model

    return inspect_model(str(folder.absolute()), model_id=model_id).geometry


POSITIONS = "max_position_embeddings"


def with_positions(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a `config.json` that say how long a request may be."""
    parts = (config, config.get("text_config"))
    return [one for one in parts if isinstance(one, dict) and isinstance(one.get(POSITIONS), int)]


def longest_context(config: dict[str, Any]) -> int | None:
    return next((int(part[POSITIONS]) for part in with_positions(config)), None)
