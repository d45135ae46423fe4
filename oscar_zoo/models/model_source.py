"""Where transformers finds a model.

Every module of this room that imports transformers imports this one first. It reports a missing
torch or transformers, and it keeps an unsuitable torchvision from breaking the import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oscar_zoo.errors import InvalidModel, MissingDependency, PathNotFound
from oscar_zoo.models import (
    model_hub,
    torchvision_ops,  # noqa: F401  (transformers imports torchvision)
)

try:
    import torch  # noqa: F401  (a missing torch is reported like a missing transformers)
    from transformers import (
        AutoModelForCausalLM,  # noqa: F401  (fails without a usable torch)
        dynamic_module_utils,
    )
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise MissingDependency.for_extra(error.name or "transformers", "compute") from error


dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # it never asks whether code of a model may run


def local_folder(path_or_id: str) -> Path | None:
    """The local folder that `path_or_id` names, or `None` for a Hugging Face id.

    A text is an id when it has the form `org/name` and no such folder exists.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InvalidModel(
            f"{path_or_id} is a file, not a model folder.", hint="name the folder that holds it"
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path_or_id):
        return None
    raise PathNotFound.for_path(path_or_id, "model folder")


def source_options(path_or_id: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """The first argument of `from_pretrained`, and the keywords that limit where it looks."""
    folder = local_folder(path_or_id)
    if folder is not None:
        return str(folder), {"trust_remote_code": False, "local_files_only": True}
    return path_or_id, {
        "trust_remote_code": False,
        "revision": revision or "main",
        **model_hub.search_limits(),
    }


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Stop transformers from printing progress bars and warnings; failures become our errors."""
    bars, level = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
