"""Lets stock SGLang import on a machine without a GPU; found through PYTHONPATH in the server and its children.

torchvision's wheel is built for CUDA and its extension does not load beside a CPU build of torch, so importing it fails
on operators it expects to exist. Declaring their schemas is enough: a text model calls none of them. The hook declares
them once, right before torchvision is imported, and only when the operators are missing.
"""

import importlib.abc
import sys
from typing import Any

OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """A finder that finds nothing: it declares the operators when torchvision is asked for, then removes itself."""

    library: Any = None  # the declarations live as long as this object

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                TorchvisionOperators.library = torch.library.Library("torchvision", "FRAGMENT")
                for name, schema in OPERATORS.items():
                    if not hasattr(torch.ops.torchvision, name):
                        TorchvisionOperators.library.define(schema)


sys.meta_path.insert(0, TorchvisionOperators())
