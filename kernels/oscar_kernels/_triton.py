"""Whether Triton can run and whether it is interpreted; launchers ask before they import a
kernel. A process that only compiles for a GPU says so here, and launchers answer for that GPU."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from oscar_kernels import nvrtc
from oscar_kernels.chips import LOWEST, Capability, Target
from oscar_kernels.spec import QuantSpec

INTEGERS = {torch.int32: "int", torch.int64: "long long"}
"""Integer types that lists of slots, rows and positions may have, as C++ names them."""
_target: Target | None = None
INSTALLED = importlib.util.find_spec("triton") is not None


def compile_for(target: Target | None) -> None:
    """Answer for a GPU that need not be here, whatever device tensors are on; `None` ends it.

    Nothing can be launched meanwhile; see `oscar_kernels.ahead`.
    """
    global _target
    _target = target
    dependent_launch.cache_clear()
    multiprocessors.cache_clear()


def interpreted() -> bool:
    """Whether kernels run in the interpreter on the CPU: the variable is set before they are
    imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it waits for has ended, which compute
    capability 9 and later can."""
    return capability(device) >= (9, 0)


def capability(device: torch.device) -> Capability:
    """Of the NVIDIA GPU that kernels are compiled for; `(0, 0)` where there is none."""
    if _target is not None:
        return _target.capability
    if interpreted() or device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return target(device).capability


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; one under the interpreter, which runs programs one by one."""
    if _target is not None:
        return _target.multiprocessors
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def require(device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Refuse a device on which Triton kernels cannot run, at all or with rows of `dtype`."""
    reason = missing(device)
    if dtype == torch.bfloat16 and interpreted():
        reason = "its interpreter has no bfloat16; give rows and `allocate` dtype=torch.float32"
    if reason is not None:
        raise ValueError(f"the Triton path cannot run: {reason}")


@functools.cache
def target(device: torch.device) -> Target:
    """An NVIDIA GPU that is here, or the older chip whose code it runs."""
    found = torch.cuda.get_device_properties(device)
    shared, number = found.shared_memory_per_block_optin, found.multi_processor_count
    return Target((found.major, found.minor), shared, number, nvrtc.version()).as_older()


def without_cuda(device: torch.device, only: Capability | None = None) -> str | None:
    """Why CUDA C++ for `only` a chip, or for any from `LOWEST` on, cannot run on a device, in one
    line; `None` if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, the tensors are on {device.type}"
    found, wanted = target(device).capability, only or LOWEST
    if found == wanted or (only is None and found > wanted):
        return None
    return f"needs compute capability {wanted[0]}.{wanted[1]}, the GPU has {found[0]}.{found[1]}"


def missing(device: torch.device | str) -> str | None:
    """Why Triton kernels cannot run on a device, in one line; `None` if they can."""
    if not INSTALLED:
        return "triton is not installed"
    device = torch.device(device)
    if interpreted() or _target is not None:
        return None
    if device.type != "cuda":
        return (
            f"Triton has no {device.type} device; TRITON_INTERPRET=1 runs its kernels slowly on any"
        )
    if torch.version.hip is None and target(device).capability < LOWEST:
        return (
            f"{torch.cuda.get_device_name(device)} is older than compute capability"
            f" {LOWEST[0]}.{LOWEST[1]}"
        )
    return None


def quarter(spec: QuantSpec) -> int:
    """Channels of a quarter of a row, padded to a power of two."""
    return 1 << (spec.head_dim // 4 - 1).bit_length()
