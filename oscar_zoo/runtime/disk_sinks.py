"""First tokens of prompts in files, beside those that the host keeps.

A block is written once a later step starts, when it is complete, by a thread that nobody waits for.
It is read when a prompt asks for it, before the prompt is promised a hit, so a hit never lacks it.
"""

from __future__ import annotations

import hashlib
import queue
import threading

import torch
from torch import Tensor

from oscar_zoo.runtime.disk_files import DiskFiles
from oscar_zoo.runtime.sink_blocks import Key
from oscar_zoo.runtime.stores import WindowStore

WAITING = 16
"""Most blocks that wait to be written; of others there is no copy."""


class DiskSinks:
    def __init__(self, files: DiskFiles, windows: WindowStore) -> None:
        self._files, self._windows = files, windows
        self._on_gpu = windows.sink_k.device.type == "cuda"
        self._queue = queue.Queue[tuple[str, list[Tensor], torch.cuda.Event | None]](WAITING)
        windows.sinks.recall, windows.before_step = self.recall, self.save
        threading.Thread(target=self._write, daemon=True).start()

    def recall(self, key: Key, place: int) -> bool:
        """Read the first tokens of a prompt into a place on the host, if they are there."""
        name = _name(key)
        if not self._files.has(name):
            return False
        targets = [host[place] for host in self._windows.host]
        sizes = [target.nbytes for target in targets]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        if not self._files.read(name, memoryview(buffer.numpy())):
            return False
        if self._on_gpu:  # a copy from or to this place may be under way
            torch.cuda.synchronize()
        for target, part in zip(targets, buffer.split(sizes), strict=True):
            target.copy_(part.view(target.dtype).view(target.shape))
        return True

    def save(self) -> None:
        """Copy out the blocks that earlier steps completed, in the current stream."""
        for key, block in self._windows.sinks.take_unsaved():
            name = _name(key)
            if self._files.has(name):
                continue
            stores = self._windows.sink_k, self._windows.sink_v
            parts = [store[:, block].to("cpu", non_blocking=True, copy=True) for store in stores]
            done = torch.cuda.Event() if self._on_gpu else None
            if done is not None:
                done.record()
            if not self._queue.full():  # nobody else puts anything
                self._queue.put((name, parts, done))

    def _write(self) -> None:
        while True:
            name, parts, done = self._queue.get()
            if done is not None:
                done.synchronize()
            self._files.write(name, *map(_bytes, parts))


def _name(key: Key) -> str:
    """Of the file, by everything that decides the first tokens of a prompt, given the tag."""
    return hashlib.sha256(repr(key).encode()).hexdigest() + ".sinks"


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
