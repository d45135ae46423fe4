"""The files that a model folder needs for loading or serving.

Their content is not read, and no torch is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from oscar_zoo.errors import InvalidModel, StorageError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that cannot be loaded or served, before anything reads its weights.

    Its `config.json` is checked elsewhere.

    Raises:
        InvalidModel: no safetensors weights, or no tokenizer.
        StorageError: weights that cannot be read.
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
    for path in sorted(folder.glob("*.safetensors")):
        if not os.access(path, os.R_OK):
            raise StorageError(
                f"cannot read {path}: permission denied, or a broken link.",
                hint="check its permissions",
            )


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files of a folder, links followed."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
