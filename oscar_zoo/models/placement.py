"""Decide where a model runs before its weights are read, and read them there.

The whole model goes on one device if it fits, and over several with `auto`. It is read from its
files decoder layer by decoder layer when the caller asks for that, or when nothing else fits and
the caller does not forbid it: a layer is read when it runs, while a thread fetches the next one,
and its memory is freed afterwards. A model that fits nowhere is refused with the missing amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oscar_zoo.errors import MissingDependency, NotEnoughMemory, UnsupportedModel
from oscar_zoo.models.checkpoint import CheckpointFile, LazyTensor, materialize, sources
from oscar_zoo.models.layer_replay import find_stacks
from oscar_zoo.models.memory import (
    AUTO,
    FreeMemory,
    Need,
    Workload,
    default_device,
    memory_errors,
    work_bytes,
)

READERS = 4
Fetched = dict[CheckpointFile, tuple[Tensor, ...]]


def place_model(
    model: Any,
    name: str,
    num_layers: int,
    *,
    device: str,
    stream: bool | None,
    workload: Workload,
    free: FreeMemory,
) -> tuple[bool, tuple[str, ...]]:
    """Read the weights of `model` to where they run: a torch device or `auto`, and layer by layer
    where the caller wants to `stream`, or leaves it open and nothing else fits. Tells whether
    layers are read when they run, and remarks for the user."""
    layers = decoder_layers(model, num_layers)
    need = need_of(model, layers, workload)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if device == AUTO and not stream and gpus:
        room_of = {gpu.index: max(0, free(gpu) - need.work) for gpu in gpus}
        device_map = spread(model, {**room_of, "cpu": free(torch.device("cpu"))})
        if "disk" not in device_map.values():
            with memory_errors(name, gpus[0], free):
                place(model, device_map)
            return False, ()
    where = torch.device(default_device() if device == AUTO else device)
    room = free(where)
    fits, streams = need.whole() <= room, bool(layers) and need.streamed(where) <= room
    wanted, stream = stream, stream if stream is not None else not fits and streams
    if stream and not layers:
        message = f"the decoder layers of {name} were not found."
        raise UnsupportedModel(message, hint="run it without --stream-weights")
    if not (streams if stream else fits):
        steps = []
        together = sum(max(0, free(gpu) - need.work) for gpu in gpus)
        if where.type == "cuda" and len(gpus) > 1 and device != AUTO and together > need.weights:
            steps.append(f"--device auto ({len(gpus)} GPUs)")
        if need.streamed(where) <= room and not wanted:
            steps.append("--stream-weights")
        if model.dtype.itemsize > 2:
            steps.append("--dtype bfloat16")
        if need.work > need.weights:
            steps.append("fewer tokens (--calib-tokens, --seq-len)")
        hint = f"use {', or '.join([*steps, 'a device with more memory'])}"
        size = need.streamed(where) if stream else need.whole()
        raise NotEnoughMemory.for_model(name, size, str(where), room, hint=hint)
    with memory_errors(name, where, free):
        if not stream:
            place(model, {"": where})
            return False, ()
        Stream(model, layers, where)
    if fits:
        return True, ()
    short = NotEnoughMemory.for_model(name, need.whole(), str(where), room, hint="").message
    done = "its weights are read layer by layer, once for each cache measured"
    return True, (f"{short.rstrip('.')}: {done}.",)


def decoder_layers(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """Of several lists of that length the one with the most weights."""
    stacks = [list(stack) for stack in find_stacks(model, num_layers)]
    return max(stacks, key=lambda stack: sum(_bytes(slots(layer)) for layer in stack), default=[])


def need_of(model: Any, layers: Sequence[nn.Module], workload: Workload) -> Need:
    of_layers = [_bytes(slots(layer)) for layer in layers]
    weights = _bytes(slots(model))
    config = model.config.get_text_config(decoder=True)
    work = work_bytes(config, workload, model.dtype.itemsize)
    return Need(weights, weights - sum(of_layers), max(of_layers, default=0), work)


def _bytes(places: Sequence[Slot]) -> int:
    unique = {id(slot.unread): slot.unread for slot in places}
    return sum(one.numel() * one.dtype.itemsize for one in unique.values())


@dataclass(frozen=True)
class Slot:
    """A place in a module, `where[name]`, at the `path` in the model, for the weight `unread`."""

    where: dict[str, Any]
    name: str
    path: str
    unread: LazyTensor

    def put(self, tensor: Tensor) -> None:
        parameter = isinstance(self.unread, nn.Parameter)
        self.where[self.name] = nn.Parameter(tensor, False) if parameter else tensor

    def clear(self) -> None:
        self.where[self.name] = self.unread


def slots(module: nn.Module, prefix: str = "") -> list[Slot]:
    found = []
    for path, one in module.named_modules(prefix=prefix):
        for where in (one._parameters, one._buffers):
            for name, tensor in where.items():
                if isinstance(tensor, LazyTensor):
                    found.append(Slot(where, name, f"{path}.{name}".lstrip("."), tensor))
    return found


def settle(places: Sequence[Slot], device_of: Callable[[str], torch.device]) -> None:
    """Read the weights of `places`, each to the device of its path; tied ones stay tied."""
    tied: dict[int, list[Slot]] = {}
    for slot in places:
        tied.setdefault(id(slot.unread), []).append(slot)

    def read(group: list[Slot]) -> Tensor:
        device = device_of(group[0].path)
        with torch.inference_mode(False), torch.no_grad():
            return materialize(group[0].unread, lambda stored: stored.read(device))

    with ThreadPoolExecutor(READERS) as pool:
        for group, tensor in zip(tied.values(), pool.map(read, tied.values()), strict=True):
            group[0].put(tensor)
            for other in group[1:]:
                other.where[other.name] = group[0].where[group[0].name]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers that no checkpoint holds, such as the frequencies of rotary embeddings."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.to(device)


def spread(model: Any, max_memory: Mapping[int | str, int]) -> dict[str, Any]:
    """Decide with accelerate which part belongs on which device: GPUs are filled first, then main
    memory, then `disk`. `max_memory` is bytes for weights, by GPU number and `cpu`."""
    accelerate = _accelerate()
    kept = {"no_split_module_classes": list(getattr(model, "_no_split_modules", None) or ())}
    balanced = accelerate.utils.get_balanced_memory(model, max_memory=dict(max_memory), **kept)
    found: dict[str, Any] = accelerate.infer_auto_device_map(model, max_memory=balanced, **kept)
    return found


def place(model: Any, device_map: Mapping[str, Any]) -> None:
    """Read every weight to its device and let accelerate carry activations between them.
    `device_map` gives devices of modules; the longest path that fits counts."""

    def device_of(path: str) -> torch.device:
        fits = (name for name in device_map if not name or f"{path}.".startswith(f"{name}."))
        return torch.device(device_map[max(fits, key=len)])

    settle(slots(model), device_of)
    if len(set(device_map.values())) == 1:
        move_buffers(model, device_of(""))
    else:
        _accelerate().dispatch_model(model, device_map=dict(device_map))


def _accelerate() -> Any:
    try:
        import accelerate
        import accelerate.utils
    except ImportError as error:
        raise MissingDependency.for_extra(error.name or "accelerate", "compute") from error
    return accelerate


class Stream:
    """Decoder `layers`, in order, that are read when they run. The rest of `model` is read now."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._slots = [slots(layer, f"layer {number}") for number, layer in enumerate(layers)]
        inside = {id(slot.where) for places in self._slots for slot in places}
        settle([slot for slot in slots(model) if id(slot.where) not in inside], lambda path: device)
        move_buffers(model, device)
        self._here: int | None = None
        self._coming: tuple[int, Future[Fetched]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
        for number, layer in enumerate(layers):
            layer.forward = self._runs(number, layer.forward)

    def bring(self, number: int) -> None:
        """Put the weights of one layer on the device, and release those of any other."""
        if self._here == number:
            return
        self.release()
        there, coming = self._coming or (None, None)
        self._coming = None
        self._put(number, coming.result() if coming and there == number else self._fetch(number))
        del coming
        self._here = number
        after = (number + 1) % len(self._slots)  # the next pass begins with the first layer
        if after != number:
            self._coming = after, self._pool.submit(self._fetch, after)

    def release(self) -> None:
        if self._here is not None:
            for slot in self._slots[self._here]:
                slot.clear()
        self._here = None

    def _put(self, number: int, fetched: Fetched) -> None:
        def read(stored: CheckpointFile) -> Tensor:
            return stored.read(self._device, fetched[stored])

        with torch.inference_mode(False), torch.no_grad():
            for slot in self._slots[number]:
                slot.put(materialize(slot.unread, read))

    def _fetch(self, number: int) -> Fetched:
        files: Iterator[Any] = (x for slot in self._slots[number] for x in sources(slot.unread))
        return {stored: stored.fetch() for stored in dict.fromkeys(files)}

    def _runs(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.bring(number)
            return forward(*args, **kwargs)

        return run
