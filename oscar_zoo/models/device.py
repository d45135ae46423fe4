"""The device that torch runs on: a checked choice of the user, or the best one available."""

from __future__ import annotations

import torch

from oscar_zoo.errors import UnsupportedMachine, UsageError
from oscar_zoo.models.nvidia_smi import NAMES

AUTO = "auto"
"""All GPUs, then main memory; for engines that can spread a model over them."""


def default_device() -> str:
    """`cuda` when torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_device(wanted: str | None, *, several: bool = False) -> str:
    """The torch device to run on: `wanted` if it is given, else the first GPU, else the CPU."""
    if wanted is None:
        return default_device()
    check_device(wanted, several=several)
    return wanted


def hardware_name(device: torch.device | str) -> str:
    """What people call `device`, such as `NVIDIA H200`; `CPU` for any processor."""
    found = torch.device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else "CPU"


def check_device(name: str, *, several: bool = False) -> None:
    """Refuse what is no device, a kind nothing here was tried on, and a GPU that is not there."""
    if several and name == AUTO:
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{name!r} is not a device.", hint=NAMES) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported.", hint=NAMES)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedMachine(
            f"there is no device {name} here.", hint="use cpu, or a torch build that sees the GPU"
        )
