"""The files that a model folder needs for loading or serving.

Only `config.json` is ever read, and no torch is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from oscar_zoo.errors import InvalidModel, StorageError
from oscar_zoo.models import weight_names
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.weight_count import quantization
from oscar_zoo.models.weight_files import check_all_there

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
READ = (
    "config.json",
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    weight_names.INDEX,
)
"""What a reader takes, or leaves out without a word, where it is no such file."""

POINTER = b"version https://git-lfs"


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that cannot be loaded or served, before anything reads its weights.

    Its `config.json` is checked elsewhere.
    """
    if not any(folder.glob("*.safetensors")):
        others = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf")
        )
        seen = f" (only {others[0]}, which is not read)" if others else ""
        raise InvalidModel(
            f"{folder} has no *.safetensors weights{seen}.", hint="convert or download them"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidModel(
            f"{folder} has no tokenizer.", hint=f"it needs one of {', '.join(TOKENIZER_FILES)}"
        )
    for name in READ:
        check_is_file(folder / name)
    for path in sorted(folder.glob("*.safetensors")):
        if not os.access(path, os.R_OK):
            raise StorageError(
                f"cannot read {path}: permission denied, or a broken link.",
                hint="check its permissions",
            )
        check_is_file(path)
    index = folder / weight_names.INDEX
    if index.is_file():  # SGLang goes by it, also where all weights are in one file
        named = weight_names.index_files(index.read_bytes(), str(index))
        check_all_there(folder, {folder / file for file in named.values()})


def check_is_file(path: Path) -> None:
    """Refuse an empty file, or a pointer that git left in place of a large file; one that is not
    there passes. Raises `InvalidModel`."""
    if not path.is_file():
        return
    with path.open("rb") as stream:
        start = stream.read(len(POINTER))
    if not start.strip():
        raise InvalidModel(f"{path} is empty.", hint="download it again")
    if start == POINTER:
        raise InvalidModel(
            f"{path} is a pointer of git-lfs and not the file itself.",
            hint=f"fetch the files: git -C {path.parent} lfs pull",
        )
    if path.suffix == ".json" and not start.lstrip().startswith(b"{"):
        raise InvalidModel(f"{path} holds no JSON object.", hint="download it again")


def stored_weights(folder: Path, file: ConfigFile) -> tuple[int, str | None]:
    """Bytes of the weight files of a folder, links followed, and the type of their numbers.

    Returns:
        The bytes, 0 where a file of the index is missing, and a type as `config.json` writes it, or
        `None` when they are quantized.
    """
    config = file.as_written
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    said = [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]
    kind = next((str(name) for name in said if name), "bfloat16")
    files = weight_names.weight_files(folder)
    there = all(path.is_file() for path in files)
    size = sum(path.stat().st_size for path in files) if there else 0
    return size, None if quantization(file) else kind
