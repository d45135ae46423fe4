"""The token pool: SGLang's slot ids and allocator, INT2 rows in the slots, and BF16 windows on top.

All state of the INT2 cache belongs to this object, because SGLang may create several attention
backends over one pool. Nobody reads rows through `get_key_buffer`: it returns an empty probe that
only shows shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from oscar_zoo.engines.sglang.compat import geometry
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore

_Stock: Any = geometry.token_pool_class()


def _refused(what: str) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"oscar-zoo INT2 KV cache: {what} is not supported")

    return method


class Int2TokenPool(_Stock):  # type: ignore[misc]
    """Stock pool with rows of `slot_shape`, whose number is filled in here, and windows beside it.
    `commit` makes accepted drafts the next tokens, given slots to copy to and from. A server with
    speculative decoding has it; there nothing else moves slots."""

    def __init__(
        self,
        *args: Any,
        slot_shape: SlotShape,
        window_shape: WindowShape,
        make_stores: Callable[[SlotShape, WindowShape, str], tuple[SlotStore, WindowStore]],
        **kwargs: Any,
    ) -> None:
        self.commit: Callable[[Tensor, Tensor], None] | None = None
        self.disk_counts: dict[str, int] = {}  # of the files with its pages, where it has some
        self._slot_shape, self._window_shape = slot_shape, window_shape
        self._make_stores = make_stores
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        expected = (self.layer_num, self.head_num, self.head_dim, self.v_head_dim)
        shape = self._slot_shape
        if expected != (shape.num_layers, shape.num_kv_heads, shape.k.head_dim, shape.v.head_dim):
            raise RuntimeError(
                f"INT2 pool: SGLang built {expected}, the budget was made for {shape}"
            )
        if self.dtype.is_floating_point:
            raise RuntimeError(
                f"INT2 pool: with {self.dtype}, models write keys from inside their rotary"
                " embedding"
            )
        # The first page is the dummy page: padding writes there.
        shape = replace(shape, num_slots=self.size + self.page_size)
        self.slots, self.windows = self._make_stores(shape, self._window_shape, self.device)
        # SGLang counts bytes and reads addresses through these two names. One of our records holds
        # both K and V.
        self.k_buffer, self.v_buffer = self.slots.codes, self.slots.affine
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._probe = {
            d: torch.empty((0, self.head_num, d), device=self.device)
            for d in (self.head_dim, self.v_head_dim)
        }
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self.slots, self.windows

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Empty probe `[0, heads, head_dim]`."""
        return self._probe[self.head_dim]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Empty probe `[0, heads, v_head_dim]`."""
        return self._probe[self.v_head_dim]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots, codes and scales together; those of accepted drafts with their exact
        rows."""
        move = self.commit or self.slots.move
        move(tgt_loc.long(), src_loc.long())

    def get_kv_size_bytes(self) -> tuple[int, int]:
        total = self.slots.nbytes + self.windows.nbytes
        return total - total // 2, total // 2

    # Only our attention backend writes rows, because they must be transformed first.
    set_kv_buffer = _refused("set_kv_buffer")
    # Draft models that write the target's cache, disaggregation, and host copies are refused; a
    # retracted request is computed again.
    set_kv_buffer_prefix_valid = _refused("set_kv_buffer_prefix_valid")
    get_contiguous_buf_infos = _refused("get_contiguous_buf_infos")
    get_cpu_copy, load_cpu_copy = _refused("get_cpu_copy"), _refused("load_cpu_copy")
