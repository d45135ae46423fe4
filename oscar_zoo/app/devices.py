"""Which device a use case runs on, in which type, and whether what it needs is installed.

Nothing here imports torch at the top, so that a missing library is reported as such.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from oscar_zoo.errors import MissingDependency

if TYPE_CHECKING:
    from oscar_zoo.models.loading import Dtype


def require_compute() -> None:
    """Check that torch and transformers are installed, without importing them.

    Raises:
        MissingDependency: one of them is not installed.
    """
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library, "compute")


def require_serve() -> None:
    """Check that torch and a supported sglang are installed, without importing them.

    Raises:
        MissingDependency: one of them is not installed.
        UnsupportedMachine: the installed sglang is outside the supported range.
    """
    from oscar_zoo.engines.sglang.compat.versions import sglang_version

    for library in ("torch", "sglang"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library, "serve")
    sglang_version()


def pick_device(wanted: str | None, *, several: bool = False) -> str:
    """The torch device to run on: `wanted` if it is given, else the first GPU, else the CPU.

    Args:
        several: `auto`, which means all GPUs, is allowed.

    Raises:
        UsageError: `wanted` is not the name of a supported device.
        UnsupportedMachine: this machine has no such GPU.
    """
    from oscar_zoo.models.device import check_device, default_device

    if wanted is None:
        return default_device()
    check_device(wanted, several=several)
    return wanted


def pick_serving_device(wanted: str | None, *, check: bool = True) -> tuple[str, int]:
    """Kind (`cpu` or `cuda`) and number of the device that a server runs on; needs no torch.

    Args:
        wanted: as the user wrote it, or `None` for the first GPU, else the CPU.
        check: refuse a GPU that this machine does not have; off for a command that another machine
            will run.

    Raises:
        UsageError: `wanted` is not the name of a supported device.
        UnsupportedMachine: this machine has no such GPU.
    """
    from oscar_zoo.models import nvidia_smi

    if wanted is None:
        return nvidia_smi.default_device(), 0
    kind, number = nvidia_smi.parse_device(wanted)
    if kind == "cuda" and check:
        nvidia_smi.check_gpu(number)
    return kind, number


def serving_dtype(wanted: Dtype, device: str) -> Dtype:
    """The type in which a server keeps weights when `wanted` is `auto`: bfloat16, or float32 on a
    CPU."""
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else "bfloat16"
