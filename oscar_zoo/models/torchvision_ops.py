"""Keeps a torchvision that does not match torch from breaking everything that imports transformers.

The registry's torchvision is built for CUDA. Beside a CPU build of torch its extension does not
load, and importing it fails on operators that the extension would have registered; transformers and
SGLang import it whenever it is installed. Declaring the schemas of the missing operators is enough:
a text model calls none of them.

Importing this module is what does it: a finder waits for the first import of torchvision.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class MissingOperators(importlib.abc.MetaPathFinder):
    """Finds nothing, declares missing operators once before torchvision is imported, and goes."""

    library: Any = None  # declarations last as long as this object

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if not _extension_loads():
                MissingOperators.library = _declare()


def _extension_loads() -> bool:
    """Whether torchvision is missing, or its native part works with this torch."""
    import torch

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for extension in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")


def _declare() -> Any:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library


if "torchvision" not in sys.modules and not any(
    isinstance(f, MissingOperators) for f in sys.meta_path
):
    sys.meta_path.insert(0, MissingOperators())
