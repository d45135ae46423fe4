"""How much memory a model needs, how much a device has, and which device torch runs on.

All is known before weights are read, so a shortage is reported in one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oscar_zoo.errors import NotEnoughMemory, UnsupportedMachine
from oscar_zoo.models.geometry import layer_config, number
from oscar_zoo.models.hardware import available_ram, parse_device, resident_set

FreeMemory = Callable[[torch.device], int]
"""Device -> bytes that this process can still use there."""

AUTO = "auto"
"""All GPUs, then main memory; for engines that can spread a model over them."""

RESERVE = 1 << 28
"""Bytes of a GPU for the context and the workspaces of its libraries."""


@dataclass(frozen=True)
class Need:
    """Bytes that running a model takes: all `weights`, those outside the decoder layers, the
    largest layer (0 when layers were not found), and activations, sums and rows."""

    weights: int
    resident: int
    layer: int
    work: int

    def whole(self) -> int:
        return self.weights + self.work

    def streamed(self, device: torch.device) -> int:
        """Bytes with one decoder layer at a time; the next one waits in main memory."""
        return self.resident + self.layer * (2 if device.type == "cpu" else 1) + self.work


@dataclass(frozen=True)
class Workload:
    """The sequences that will run: tokens of the longest one, and of all of a calibration."""

    longest: int = 0
    tokens: int = 0


def work_bytes(config: Any, workload: Workload, itemsize: int) -> int:
    """Bytes for everything except the weights, about: the activations of one sequence, the hidden
    states and one layer's rows of all sequences, logits, and float64 sums."""
    layers = number(config, "num_hidden_layers")
    last = layer_config(config, layers - 1)
    hidden, heads = number(config, "hidden_size"), max(1, number(config, "num_attention_heads"))
    width = number(last, "head_dim") or hidden // heads
    kv_heads = number(last, "num_key_value_heads") or heads
    picked = max(1, number(config, "num_experts_per_tok"))
    of_experts = number(config, "moe_intermediate_size") * picked
    inner = max(number(config, "intermediate_size"), of_experts)
    one = 6 * hidden + 3 * inner + 4 * heads * width + 4 * kv_heads * width
    logits = workload.longest * number(config, "vocab_size") * (itemsize + 4)
    rows = workload.tokens * (hidden + 2 * kv_heads * width) * itemsize
    sums = 6 * 8 * width * width * kv_heads * layers if workload.tokens else 0
    return workload.longest * one * itemsize + logits + rows + sums


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`, about."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, int(torch.cuda.mem_get_info(device)[0] + unused) - RESERVE)
    return available_ram()


@contextmanager
def memory_errors(
    model: str, device: torch.device, free: FreeMemory = free_memory
) -> Iterator[None]:
    """Turn the out-of-memory errors of torch and Python into one line."""
    try:
        yield
    except NotEnoughMemory:
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        if type(error) is RuntimeError and "can't allocate memory" not in text:
            raise
        used = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_set()
        need = used + max(_requested(text), 1 << 20)
        room = min(used + free(device), need)  # more is free in pieces that are too small
        hint = (
            "use shorter sequences (--seq-len), --stream-weights, --dtype bfloat16 or more memory"
        )
        raise NotEnoughMemory.for_model(model, need, str(device), room, hint=hint) from None


def _requested(text: str) -> int:
    plain = re.search(r"tried to allocate (\d+) bytes", text)
    if plain:
        return int(plain[1])
    scaled = re.search(r"[Tt]ried to allocate ([\d.]+) ([KMGT])iB", text)
    return int(float(scaled[1]) * 1024 ** " KMGT".index(scaled[2])) if scaled else 0


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_device(wanted: str | None, *, several: bool = False) -> str:
    if wanted is None:
        return default_device()
    check_device(wanted, several=several)
    return wanted


def hardware_name(device: torch.device | str) -> str:
    """What people call `device`, such as `NVIDIA H200`; `CPU` for any processor."""
    found = torch.device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else "CPU"


def check_device(name: str, *, several: bool = False) -> None:
    if several and name == AUTO:
        return
    kind, index = parse_device(name)
    if kind == "cuda" and index >= torch.cuda.device_count():
        hint = "use cpu, or a torch build that sees the GPU"
        raise UnsupportedMachine(f"there is no device {name} here.", hint=hint)
