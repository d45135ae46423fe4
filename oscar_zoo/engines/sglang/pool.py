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

from oscar_zoo.engines.sglang.compat import radix_attention
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

_Stock: Any = radix_attention.token_pool_class()


class Int2TokenPool(_Stock):  # type: ignore[misc]
    """Stock pool with other rows.

    Args:
        slot_shape: shape of the slots; the number of slots is filled in here.
        window_shape: shape of the windows.
        make_stores: makes both stores on a device.

    Attributes:
        commit: makes accepted drafts the next tokens, given slots to copy to and from. A server
            with speculative decoding has it; there nothing else moves slots.
    """

    def __init__(
        self,
        *args: Any,
        slot_shape: SlotShape,
        window_shape: WindowShape,
        make_stores: Callable[[SlotShape, WindowShape, str], tuple[SlotStore, WindowStore]],
        **kwargs: Any,
    ) -> None:
        self.commit: Callable[[Tensor, Tensor], None] | None = None
        self._slot_shape, self._window_shape, self._make_stores = (
            slot_shape,
            window_shape,
            make_stores,
        )
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
        """Both probes."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, *_: Any, **__: Any) -> NoReturn:
        """Only our attention backend writes rows, because they must be transformed first."""
        self._refuse("set_kv_buffer")

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots, codes and scales together; those of accepted drafts with their exact
        rows."""
        move = self.commit or self.slots.move
        move(tgt_loc.long(), src_loc.long())

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of everything that this pool allocated, split evenly because SGLang asks for K and
        V."""
        total = self.slots.nbytes + self.windows.nbytes
        return total - total // 2, total // 2

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Disaggregation is refused."""
        self._refuse("get_contiguous_buf_infos")

    def get_cpu_copy(self, *_: Any, **__: Any) -> NoReturn:
        """Host offload is refused; a retracted request is computed again."""
        self._refuse("get_cpu_copy")

    def load_cpu_copy(self, *_: Any, **__: Any) -> NoReturn:
        """Host offload is refused."""
        self._refuse("load_cpu_copy")

    def set_kv_buffer_prefix_valid(self, *_: Any, **__: Any) -> NoReturn:
        """Draft models that write the target's cache are refused."""
        self._refuse("set_kv_buffer_prefix_valid")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"oscar-zoo INT2 KV cache: {what} is not supported")
