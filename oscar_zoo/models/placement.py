"""Decide where a model runs before its weights are read, and read them there.

The whole model goes on one device if it fits, and over several with `auto`. It is read from its
files decoder layer by decoder layer when the caller asks for that, or when nothing else fits and
the caller does not forbid it. A model that fits nowhere is refused with one line that states the
missing amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oscar_zoo.errors import NotEnoughMemory, UnsupportedModel
from oscar_zoo.models.device import AUTO, default_device
from oscar_zoo.models.layer_replay import find_stacks
from oscar_zoo.models.memory import FreeMemory, Need, Workload, memory_errors, work_bytes
from oscar_zoo.models.offload import Slot, Stream, place, slots, spread


@dataclass(frozen=True)
class PlacementRequest:
    """Where the caller wants a model.

    Attributes:
        device: a torch device, or `auto`.
        stream: weights layer by layer from their files; `None` when the model does not fit
            otherwise.
        workload: the sequences that will run.
        free: how much memory a device has.
    """

    device: str
    stream: bool | None
    workload: Workload
    free: FreeMemory


@dataclass(frozen=True)
class Placed:
    """The result of placing a model.

    Attributes:
        streamed: weights come from files, layer by layer.
        notes: remarks for the user.
    """

    streamed: bool
    notes: tuple[str, ...] = ()


def place_model(model: Any, name: str, num_layers: int, wish: PlacementRequest) -> Placed:
    """Read the weights of `model` to where they run."""
    layers = decoder_layers(model, num_layers)
    need = need_of(model, layers, wish.workload)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if wish.device == AUTO and not wish.stream and len(gpus) > 0:
        room = {gpu.index: max(0, wish.free(gpu) - need.work) for gpu in gpus}
        room |= {"cpu": wish.free(torch.device("cpu"))}
        device_map = spread(model, room)
        if "disk" not in device_map.values():
            with memory_errors(name, gpus[0], wish.free):
                place(model, device_map)
            return Placed(False)
    device = torch.device(default_device() if wish.device == AUTO else wish.device)
    return _on_one(model, name, layers, need, device, wish)


def _on_one(
    model: Any,
    name: str,
    layers: Sequence[nn.Module],
    need: Need,
    device: torch.device,
    wish: PlacementRequest,
) -> Placed:
    room = wish.free(device)
    fits, streams = need.whole() <= room, bool(layers) and need.streamed(device) <= room
    stream = wish.stream if wish.stream is not None else not fits and streams
    if stream and not layers:
        raise UnsupportedModel(
            f"the decoder layers of {name} were not found.", hint="run it without --stream-weights"
        )
    if not (streams if stream else fits):
        wanted = need.streamed(device) if stream else need.whole()
        raise NotEnoughMemory.for_model(
            name, wanted, str(device), room, hint=_what_works(model, need, device, wish)
        )
    with memory_errors(name, device, wish.free):
        if not stream:
            place(model, {"": device})
            return Placed(False)
        Stream(model, layers, device)
    if fits:
        return Placed(True)
    short = NotEnoughMemory.for_model(name, need.whole(), str(device), room, hint="").message
    return Placed(
        True,
        (
            (
                f"{short.rstrip('.')}: its weights are read layer by layer, once for each cache"
                " measured."
            ),
        ),
    )


def decoder_layers(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """The layers of the decoder, or an empty list when there are none.

    Of several lists of that length it is the one with the most weights.
    """
    stacks = [list(stack) for stack in find_stacks(model, num_layers)]
    return max(stacks, key=lambda stack: sum(_bytes(slots(layer)) for layer in stack), default=[])


def need_of(model: Any, layers: Sequence[nn.Module], workload: Workload) -> Need:
    """The memory that a model with lazy weights needs; tied weights count once."""
    of_layers = [_bytes(slots(layer)) for layer in layers]
    weights = _bytes(slots(model))
    config = model.config.get_text_config(decoder=True)
    work = work_bytes(config, workload, model.dtype.itemsize)
    return Need(weights, weights - sum(of_layers), max(of_layers, default=0), work)


def _bytes(places: Sequence[Slot]) -> int:
    unique = {id(slot.unread): slot.unread for slot in places}
    return sum(one.numel() * one.dtype.itemsize for one in unique.values())


def _what_works(model: Any, need: Need, device: torch.device, wish: PlacementRequest) -> str:
    """The hint: the next step that would help."""
    steps = []
    gpus = torch.cuda.device_count()
    together = sum(
        max(0, wish.free(torch.device("cuda", index)) - need.work) for index in range(gpus)
    )
    if device.type == "cuda" and gpus > 1 and wish.device != AUTO and together > need.weights:
        steps.append(f"--device auto ({gpus} GPUs)")
    if need.streamed(device) <= wish.free(device) and not wish.stream:
        steps.append("--stream-weights")
    if model.dtype.itemsize > 2:
        steps.append("--dtype bfloat16")
    if need.work > need.weights:
        steps.append("fewer tokens (--calib-tokens, --seq-len)")
    return f"use {', or '.join([*steps, 'a device with more memory'])}"
