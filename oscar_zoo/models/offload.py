"""Where weights are while a model runs: on one device, on several, or in files.

A model arrives with weights that are `LazyTensor`s. `settle` reads all of them. `Stream` reads
everything except the decoder layers. It reads a decoder layer when that layer runs, while a thread
fetches the next one, and frees its memory afterwards. So at most one layer is on the device and one
is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oscar_zoo.errors import MissingDependency
from oscar_zoo.models.checkpoint import CheckpointFile
from oscar_zoo.models.lazy_tensor import LazyTensor, materialize, sources

READERS = 4
Fetched = dict[CheckpointFile, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Slot:
    """A place in a module where a weight belongs.

    Attributes:
        where: its parameters or its buffers.
        name: in there.
        path: of the model.
        unread: the lazy weight that belongs there.
    """

    where: dict[str, Any]
    name: str
    path: str
    unread: LazyTensor

    def put(self, tensor: Tensor) -> None:
        """Store the numbers in this place."""
        self.where[self.name] = (
            nn.Parameter(tensor, False) if isinstance(self.unread, nn.Parameter) else tensor
        )

    def clear(self) -> None:
        """Drop the numbers."""
        self.where[self.name] = self.unread


def slots(module: nn.Module, prefix: str = "") -> list[Slot]:
    """All places below `module` whose weights are unread."""
    found = []
    for path, one in module.named_modules(prefix=prefix):
        for where in (one._parameters, one._buffers):
            for name, tensor in where.items():
                if isinstance(tensor, LazyTensor):
                    found.append(Slot(where, name, f"{path}.{name}".lstrip("."), tensor))
    return found


def settle(places: Sequence[Slot], device_of: Callable[[str], torch.device]) -> None:
    """Read the weights of `places`; tied ones stay tied.

    Args:
        device_of: path of a weight -> its device.
    """
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


def spread(model: Any, max_memory: Mapping[int | str, int] | None = None) -> dict[str, Any]:
    """Decide with accelerate which part of a model belongs on which device.

    GPUs are filled first, then main memory, then `disk`.

    Args:
        max_memory: bytes for weights, by GPU number and `cpu`; `None` for all that are free.
    """
    accelerate = _accelerate()
    whole = getattr(model, "_no_split_modules", None)
    balanced = accelerate.utils.get_balanced_memory(
        model,
        max_memory=dict(max_memory) if max_memory else None,
        no_split_module_classes=list(whole or ()),
    )
    found: dict[str, Any] = accelerate.infer_auto_device_map(
        model, max_memory=balanced, no_split_module_classes=list(whole or ())
    )
    return found


def place(model: Any, device_map: Mapping[str, Any], offload_dir: str | None = None) -> None:
    """Read every weight to its device and let accelerate carry activations between them.

    Args:
        device_map: path of a module -> GPU number or name of a device, or `disk`; the longest path
            that fits counts.
    """

    def device_of(path: str) -> torch.device:
        fits = [
            name for name in device_map if not name or path == name or path.startswith(f"{name}.")
        ]
        device = device_map[max(fits, key=len)]
        return torch.device("cpu" if device == "disk" else device)

    settle(slots(model), device_of)
    devices = set(device_map.values())
    if len(devices) == 1 and "disk" not in devices:
        move_buffers(model, device_of(""))
        return
    _accelerate().dispatch_model(model, device_map=dict(device_map), offload_dir=offload_dir)


def _accelerate() -> Any:
    try:
        import accelerate
        import accelerate.utils
    except ImportError as error:
        raise MissingDependency.for_extra(error.name or "accelerate", "compute") from error
    return accelerate


class Stream:
    """Decoder layers that are read when they run.

    Args:
        model: with lazy weights; everything except the decoder layers is read now.
        layers: of the decoder, in order.
        device: where the model runs.
    """

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
        """Free the memory of the layer that is on the device."""
        if self._here is not None:
            for slot in self._slots[self._here]:
                slot.clear()
        self._here = None

    def _put(self, number: int, fetched: Fetched) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for slot in self._slots[number]:
                slot.put(
                    materialize(
                        slot.unread, lambda stored: stored.read(self._device, fetched[stored])
                    )
                )

    def _fetch(self, number: int) -> Fetched:
        return {stored: stored.fetch() for stored in self._files(number)}

    def _files(self, number: int) -> Iterator[Any]:
        return (
            stored for slot in self._slots[number] for stored in dict.fromkeys(sources(slot.unread))
        )

    def _runs(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The `forward` of a streamed layer.

        It is replaced instead of hooked, so a replacement of the layer's computation needs no
        weights.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            self.bring(number)
            return forward(*args, **kwargs)

        return run
