"""What in a model's folder would choose code: kernels of a hub, and classes that are none of their
kind.

Code that ships with a model is never run. That does not keep transformers and SGLang from running
what a file names: an attention implementation `org/name` is a kernel, which is fetched and run
where the package `kernels` is installed, and a tokenizer class may be any name of transformers.
Such files are refused by name here, without torch and before a library reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.files import read_file
from oscar_zoo.errors import InvalidModel, MalformedFile, PathNotFound

FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
MAX_BYTES = 16 << 20

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


def refuse_chosen_code(folder: Path, where: str) -> None:
    """Refuse a folder whose files name code to be run."""
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
                raise InvalidModel(
                    f"{name} of {where} names the {key} {value[:80]!a}, which is none.",
                    hint="download the model again, from a publisher whom you trust",
                )
            if key == "configuration_files" and name == "config.json":
                raise InvalidModel(
                    f"{name} of {where} sends readers to other files by {key}.",
                    hint=f"remove {key} from {name}",
                )


def _kernel_in(value: Any) -> str | None:
    """The first text in `value`, pairs and lists included, that names a repository."""
    if isinstance(value, (list, tuple)):
        return next((found for one in value if (found := _kernel_in(one)) is not None), None)
    return value if isinstance(value, str) and ("/" in value or "\\" in value) else None


def _pairs(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    """Every key of a JSON file with its value, at any depth; a key that is set twice comes twice.

    What is no JSON is left to its reader.
    """
    try:
        # resolved: files in the cache of a hub's client are links
        data = read_file(path.resolve(), max_bytes=MAX_BYTES)
        waiting = [json.loads(data, object_pairs_hook=tuple)]
    except PathNotFound:
        return
    except MalformedFile as error:
        raise InvalidModel(error.message, hint="download the model again") from None
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
