"""SGLang's pool of pages in the host's memory, with records of ours in place of rows, and its
storage backend, with the same records in files.

SGLang decides which pages are copied out and which come back, and calls the pool on a stream of its
own. Its own pools copy rows of keys and values, which our slots do not hold. Which pages are
written and read, threads of its own decide. They name a page by a hash of all tokens up to its end
and of what else decides their keys and values, such as the salt of a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.engines.sglang.compat import server_arguments
from oscar_zoo.errors import NotEnoughMemory
from oscar_zoo.models.hardware import available_ram
from oscar_zoo.runtime.disk_files import DiskFiles
from oscar_zoo.runtime.host_pages import HostPages

logger = logging.getLogger(__name__)


def _stock() -> tuple[Any, Any]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    return HostKVCache, HiCacheStorage


_Pool: Any
_Storage: Any
_Pool, _Storage = _stock()


class Int2HostPool(_Pool):  # type: ignore[misc]
    """Numbers of host slots are given out by SGLang's code; the memory behind them is `pages`."""

    def __init__(self, pool: Any, page_size: int) -> None:
        # SGLang's own constructor has other parameters in every release, and refuses a machine with
        # less than 10 GB to spare.
        args = server_arguments.published()
        self.device_pool, self.page_size, self.pool_label = pool, page_size, "kv"
        self.layout, self.device, self.dtype = args.hicache_mem_layout, "cpu", torch.uint8
        self.pin_memory = self.can_use_write_back_jit = False
        self.start_layer, self.end_layer = pool.start_layer, pool.end_layer
        self.layer_num = self.target_layer_num = pool.layer_num
        self.size_per_token = self.get_size_per_token()
        self.device_capacity_tokens = pool.size
        if args.hicache_size > 0:
            wanted = int(args.hicache_size * 1e9 // self.size_per_token)
        else:
            wanted = int(pool.size * args.hicache_ratio)
        self.page_num = max(1, wanted // page_size)
        self.size = self.page_num * page_size
        need, free = self.size * self.size_per_token, available_ram()
        if need > free:
            hint = "--hicache-size is in GB, and every GPU has as many"
            raise NotEnoughMemory.for_model(
                "the cache in the host's memory", need, "the host", free, hint=hint
            )
        self.pages = HostPages(pool.slots, page_size, self.page_num)
        told = (
            "INT2 KV cache: %d tokens in %.1f GB of the host's memory, and the first of %d prompts"
        )
        logger.info(told, self.size, need / 1e9, pool.windows.sinks.host)
        self.kv_buffer = self.init_kv_buffer()
        self.lock = threading.RLock()
        self.clear()

    def get_size_per_token(self) -> int:
        return sum(buffer[0].nbytes for buffer in self.device_pool.slots.buffers())

    def init_kv_buffer(self) -> Tensor:
        return self.pages.memory

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        **_: Any,
    ) -> None:
        """SGLang asks for all layers of the same pages, one after the other."""
        if layer_id == 0:
            pages = self._pages(host_indices), self._pages(device_indices)
            self._loading = self.pages.load(*pages)
        next(self._loading)

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        self.pages.save(self._pages(device_indices), self._pages(host_indices))

    def _pages(self, slots: Tensor) -> Tensor:
        """Numbers of the pages of slots, which SGLang gives out page by page."""
        return slots[:: self.page_size].cpu() // self.page_size

    def destroy(self) -> None:
        self.pages.close()

    def get_data_page(self, index: Any, flat: bool = True) -> Tensor:
        """The record of a page, by its first slot."""
        return self.pages.record(int(index) // self.page_size)

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.empty(self.pages.record_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: Any, data_page: Tensor) -> None:
        self.pages.fill(int(index) // self.page_size, data_page)


class Int2DiskPages(_Storage):  # type: ignore[misc]
    def __init__(self, files: DiskFiles) -> None:
        self._files = files
        with suppress(ImportError, RuntimeError):
            # SGLang would compile it when a prompt is first looked up, and find no file meanwhile.
            from sglang.srt.mem_cache.cpp_utils import native_hash

            native_hash._load_native_hash_module()

    def exists(self, key: str) -> bool:
        return self._files.has(f"{key}.page")

    def get(self, key: str, target_location: Tensor, *_: Any, **__: Any) -> Tensor | None:
        there = self._files.read(f"{key}.page", memoryview(target_location.numpy()))
        return target_location if there else None

    def set(self, key: str, value: Tensor, *_: Any, **__: Any) -> bool:
        return self._files.write(f"{key}.page", memoryview(value.numpy()))

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[Tensor], *_: Any, **__: Any
    ) -> list[Tensor | None]:
        """Nothing is read behind a page that is missing, and nothing would use it."""
        found = [*takewhile(lambda one: one is not None, map(self.get, keys, target_locations))]
        return [*found, *[None] * (len(keys) - len(found))]

    def batch_set(self, keys: Sequence[str], values: Sequence[Tensor], *_: Any, **__: Any) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def clear(self) -> None:
        self._files.clear()
