"""The files that a model folder needs, and whether its weight files are there and whole, from their
headers and sizes.

Needs no torch, and reads no number: headers of 200 GB of weights take less than two seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import mistaken_content, read_start
from oscar_zoo.artifact.tensor_file import METADATA
from oscar_zoo.errors import InvalidModel, MalformedFile, StorageError
from oscar_zoo.models.config_file import ConfigFile, gguf_refusal
from oscar_zoo.models.geometry import quantization

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 1 << 27
_LENGTH = 8
"""Bytes in front of a header, which say its length."""

PIECES, PIECE = 256, 4096
"""Pieces of a file that go into its fingerprint, and their bytes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
READ = (
    "config.json",
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    INDEX,
)
"""What a reader takes, or leaves out without a word, where it is no such file."""


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that cannot be loaded or served, before anything reads its weights."""
    if not any(folder.glob("*.safetensors")):
        message = f"{folder} has no *.safetensors weights; no others are read."
        raise gguf_refusal(folder) or InvalidModel(message, hint="convert or download them")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        hint = f"it needs one of {', '.join(TOKENIZER_FILES)}"
        raise InvalidModel(f"{folder} has no tokenizer.", hint=hint)
    for name in READ:
        check_is_file(folder / name)
    for path in sorted(folder.glob("*.safetensors")):
        if not os.access(path, os.R_OK):
            message = f"cannot read {path}: permission denied, or a broken link."
            raise StorageError(message, hint="check its permissions")
        check_is_file(path)
    index = folder / INDEX
    if index.is_file():  # SGLang goes by it, also where all weights are in one file
        named = index_files(index.read_bytes(), str(index))
        check_all_there(folder, {folder / file for file in named.values()})


def check_is_file(path: Path) -> None:
    """Refuse an empty file, or a pointer that git left in place of one; a missing one passes."""
    if not path.is_file():
        return
    start = read_start(path.resolve(), 256)
    if mistake := mistaken_content(start.strip()):
        raise InvalidModel(f"{path} is {mistake[1]}.", hint=mistake[2])
    if path.suffix == ".json" and not start.lstrip().startswith(b"{"):
        raise InvalidModel(f"{path} holds no JSON object.", hint="download it again")


def stored_weights(folder: Path, file: ConfigFile) -> tuple[int, str | None]:
    """Bytes of the weight files of a folder, 0 where one is missing, and the type of their numbers
    as `config.json` writes it, `None` when they are quantized."""
    config = file.as_written
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    said = [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]
    kind = next((str(name) for name in said if name), "bfloat16")
    files = weight_files(folder)
    there = all(path.is_file() for path in files)
    size = sum(path.stat().st_size for path in files) if there else 0
    return size, None if quantization(file) else kind


def check_weight_files(folder: Path) -> None:
    """Refuse a folder whose weights, those of `weight_files`, a server would fail to load."""
    files = weight_files(folder)
    check_all_there(folder, files)
    for path in files:
        try:
            entries, end = _header(path)
            size = path.stat().st_size
            ends = [entries[name]["data_offsets"][1] for name in entries if name != METADATA]
            wanted = end + max(ends, default=0)
        except OSError as error:
            raise StorageError.for_os(f"cannot read {path}", error) from None
        except (LookupError, TypeError):
            raise damaged(f"cannot load {path}: it has no safetensors header") from None
        if size != wanted:
            said = f"it has {size:,} bytes, and its header says {wanted:,}"
            raise damaged(f"cannot load {path}: {said}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where it ends: 8 bytes with its length, then a JSON
    object."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        header = stream.read(length) if length <= LARGEST_INDEX else b""
        size = path.stat().st_size
    if len(header) < length:
        raise damaged(f"cannot load {path}: it has {size:,} bytes, which is less than its header")
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise damaged(f"cannot load {path}: it has no safetensors header")
    return entries, _LENGTH + length


def check_all_there(folder: Path, files: Collection[Path]) -> None:
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        said = f"{len(missing)} of {len(files)} weight files, {missing[0]} first"
        raise damaged(f"{folder} lacks {said}")


def stored_names(folder: Path) -> frozenset[str] | None:
    """The names of all weights, where a file says them."""
    single, index = folder / SINGLE, folder / INDEX
    try:
        if single.is_file():
            return frozenset(_header(single)[0]) - {METADATA}
        if not index.is_file():
            return None
        data = index.read_bytes()
    except OSError as error:
        raise damaged(f"cannot read the weights of {folder}: {error}") from None
    return frozenset(index_files(data, str(index)))


def index_files(index: bytes, what: str) -> dict[str, str]:
    try:
        named = strict_json.loads(index, what=what, max_bytes=LARGEST_INDEX)["weight_map"]
        files = named.values()
        if not named or not all(isinstance(x, str) and Path(x).name == x for x in files):
            raise ValueError("its weight_map names no files")
    except (MalformedFile, LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(f"{what} is no index of weights: {first_line(error)}") from None
    return dict(named)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, there or not."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    named = index_files((folder / INDEX).read_bytes(), str(folder / INDEX))
    return [folder / file for file in sorted(set(named.values()))]


def fingerprint(folder: Path) -> str:
    """A digest that differs where a fine-tune does: of `config.json`, of the index, and of name,
    size, time and some pieces of each weight file. Two fine-tunes of one base have files of the
    same names and sizes, and to read all of them would take minutes."""
    digest, weights = hashlib.sha256(), weight_files(folder)
    check_all_there(folder, weights or [folder / SINGLE])
    for path in (folder / "config.json", folder / INDEX, *weights):
        if not path.is_file():
            continue
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
        with path.open("rb") as stream:
            for piece in range(PIECES):
                stream.seek(piece * max(PIECE, status.st_size // PIECES))
                digest.update(stream.read(PIECE))
    return digest.hexdigest()


def damaged(what: str) -> InvalidModel:
    """The error for a checkpoint; `what` is wrong with it, without a full stop."""
    hint = "the checkpoint is incomplete or damaged; download it again"
    return InvalidModel(f"{what}.", hint=hint)


def first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:300].rstrip(".")
