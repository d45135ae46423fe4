"""SGLang's storage backend: pages of our pool on the host in files. SGLang decides which pages are
written and read, in threads of its own, and names them by a hash of all tokens up to their end and
of what else decides their keys and values, such as the salt of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oscar_zoo.runtime.disk_files import DiskFiles

if TYPE_CHECKING:
    from torch import Tensor


def _stock() -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return HiCacheStorage


_Stock: Any = _stock()


class Int2DiskPages(_Stock):  # type: ignore[misc]
    def __init__(self, files: DiskFiles) -> None:
        self._files = files

    def exists(self, key: str) -> bool:
        return self._files.has(_name(key))

    def get(self, key: str, target_location: Tensor, *_: Any, **__: Any) -> Tensor | None:
        there = self._files.read(_name(key), memoryview(target_location.numpy()))
        return target_location if there else None

    def set(self, key: str, value: Tensor, *_: Any, **__: Any) -> bool:
        return self._files.write(_name(key), memoryview(value.numpy()))

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[Tensor], *_: Any, **__: Any
    ) -> list[Tensor | None]:
        """Nothing is read behind a page that is missing, and nothing would use it."""
        found: list[Tensor | None] = []
        for key, target in zip(keys, target_locations, strict=True):
            found.append(None if None in found[-1:] else self.get(key, target))
        return found

    def batch_set(self, keys: Sequence[str], values: Sequence[Tensor], *_: Any, **__: Any) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def clear(self) -> None:
        self._files.clear()


def _name(key: str) -> str:
    return f"{key}.page"
