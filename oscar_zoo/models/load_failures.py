"""What it means when transformers cannot read a part of a model.

Anybody may have written the files, and the types of its errors are not public.
"""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.errors import InvalidModel, NetworkError, OscarZooError, UnsupportedModel

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models import (
    model_hub,
    model_source,  # noqa: F401
)
from oscar_zoo.models.config_age import written_by_newer
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_caches import refuse_other_caches

# isort: split

import transformers
from transformers import CONFIG_MAPPING


def unusable(where: str, what: str, error: Exception) -> InvalidModel | NetworkError:
    """The error to raise when `what` of the model `where` could not be read because of `error`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    cause = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    trouble = None if Path(where).is_dir() else model_hub.unreachable()
    if trouble is not None:
        return NetworkError(
            f"{where} is not complete on this machine, and Hugging Face cannot be reached:"
            f" {trouble}.",
            hint="check the network, or give a local folder",
        )
    if not Path(where).is_dir() and ("connect" in cause or "offline" in cause):
        return NetworkError(
            f"cannot load {where}: {cause[:300]}", hint="check the network, or give a local folder"
        )
    return InvalidModel(
        f"cannot load {where}: {what}: {cause[:300]}",
        hint=(
            "it needs config.json, *.safetensors and a tokenizer"
            if Path(where).is_dir()
            else "check its name, the revision and the network, or give a local folder"
        ),
    )


def unread_config(
    where: str, folder: Path | None, model_id: str, error: Exception
) -> OscarZooError:
    """The error to raise when the `config.json` of the model `where` could not be read because of
    `error`.

    Args:
        folder: with the file, or `None` where it was not found.
    """
    told = unusable(where, "its config.json", error)
    if folder is None:
        return told
    written = ConfigFile.of_folder(folder)
    kind = getattr(written, "model_type", None)
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        # a reason that holds for every release, if there is one
        refuse_other_caches(written, written.get_text_config(), model_id)
        return UnsupportedModel(
            f"{model_id} ({kind}) is of a model type that transformers {transformers.__version__}"
            " does not have, and code that ships with a model is never run.",
            hint="serve it with SGLang alone, without an INT2 cache",
        )
    newer = written_by_newer(written)
    if newer is None:
        return told
    return InvalidModel(told.message, hint=f"transformers {newer} wrote it: update transformers")
