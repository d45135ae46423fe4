"""Several processes, one capture: each runs its own sequences, and sums add.

`torchrun` starts the processes and sets the environment that is read here. A single process needs
none of it and pays nothing for it. Every process must make the same calls in the same order. The
first call opens the process group, and the end of the process closes it.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from oscar_zoo.compute.capture.checkpoint import COUNTS, SUMS
from oscar_zoo.compute.layer_moments import LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, UsageError


@dataclass(frozen=True)
class World:
    """The processes of one capture.

    Attributes:
        rank: of this process; rank 0 writes.
        size: number of processes.
        device: of exchanged tensors: the GPU of this process for NCCL, the CPU for gloo.
    """

    rank: int
    size: int
    device: torch.device

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all processes, on its device; with one process, `tensor`."""
        return tensor if self.size == 1 else self._reduce(tensor, distributed.ReduceOp.SUM)

    def least(self, number: int) -> int:
        """The smallest `number` of all processes."""
        if self.size == 1:
            return number
        return int(
            self._reduce(torch.tensor([number], device=self.device), distributed.ReduceOp.MIN)
        )

    def _reduce(self, tensor: Tensor, operation: object) -> Tensor:
        exchanged = tensor.to(self.device, copy=True)
        try:
            if not distributed.is_initialized():
                distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
                atexit.register(
                    distributed.destroy_process_group
                )  # a second group of the same store would hang
            distributed.all_reduce(exchanged, operation)
        except (RuntimeError, ValueError) as error:
            cause = str(error).partition("\n")[0][:200]
            raise ComputeFailed(
                f"process {self.rank} of {self.size} lost the others: {cause}.",
                hint="see what they say; start all with torchrun",
            ) from None
        return exchanged.to(tensor.device)


def rank_and_size() -> tuple[int, int]:
    """`(rank, number of processes)` as `torchrun` set them; `(0, 1)` without it.

    Raises:
        UsageError: the environment makes no sense.
    """
    rank, size = (_number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if rank >= size:
        raise UsageError(
            f"this is process {rank} of {size}.",
            hint="start it with torchrun, or unset RANK, WORLD_SIZE",
        )
    return rank, size


def local_device(device: str) -> str:
    """`device`, or for a bare `cuda` the GPU of this process among those of its machine."""
    return (
        f"cuda:{_number('LOCAL_RANK', 0)}"
        if device == "cuda" and rank_and_size()[1] > 1
        else device
    )


def world(device: torch.device | str = "cpu") -> World:
    """The processes that `torchrun` started, or this one alone.

    Args:
        device: where this process runs the model.

    Raises:
        UsageError: see `rank_and_size`.
    """
    rank, size = rank_and_size()
    device = torch.device(device)
    return World(rank, size, device if device.type == "cuda" else torch.device("cpu"))


def all_reduce_moments(moments: Moments, world: World) -> None:
    """Replace the sums of each process by the sums of all.

    Output weights stay, because they are equal in all processes.
    """
    if world.size > 1:
        for _, layer in sorted(moments.layers.items()):
            _reduce_layer(layer, world)


def _reduce_layer(layer: LayerMoments, world: World) -> None:
    sums = [getattr(layer, name) for name in SUMS]
    counts = layer.qq.new_tensor([getattr(layer, name) for name in COUNTS])  # exact up to 2**53
    flat = world.add_up(torch.cat([*(one.flatten() for one in sums), counts]))
    *parts, counts = flat.split([*(one.numel() for one in sums), len(COUNTS)])
    for name, one, part in zip(SUMS, sums, parts, strict=True):
        setattr(layer, name, part.view_as(one))
    for name, count in zip(COUNTS, counts.tolist(), strict=True):
        setattr(layer, name, int(count))


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdecimal():
        raise UsageError(
            f"{name} is {value[:40]!r}, not a number.", hint="start it with torchrun, or unset it"
        )
    return int(value)
