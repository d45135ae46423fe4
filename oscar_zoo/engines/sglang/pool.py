"""The token pool: SGLang's slot ids and allocator, our rows in the slots, and the uncompressed tier
on top.

All state of the INT2 cache belongs to this object, because several attention backends may be
created over one pool. Nobody reads rows through `get_key_buffer`: it returns an empty probe that
only tells shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from oscar_zoo.engines.sglang.compat import radix_attention
from oscar_zoo.runtime.sink_blocks import SinkBlocks
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

_Stock: Any = radix_attention.token_pool_class()


class Int2TokenPool(_Stock):  # type: ignore[misc]
    """Stock pool with other rows.

    Args:
        args, kwargs: those of the stock pool.
        slot_shape: shape of the slots; the number of slots is filled in here.
        side_shape: shape of rings and sinks.
        sinks: who has which sink block.
        mode: `int2`, or a test mode.
    """

    def __init__(
        self,
        *args: Any,
        slot_shape: SlotShape,
        side_shape: WindowShape,
        sinks: SinkBlocks | None = None,
        mode: str = "int2",
        **kwargs: Any,
    ) -> None:
        self._slot_shape, self._side_shape, self._sinks, self._mode = (
            slot_shape,
            side_shape,
            sinks,
            mode,
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
        self.slots = SlotStore(shape, self.device, self._mode)
        self.side = WindowStore(self._side_shape, self.device, self._sinks)
        # SGLang's code that counts bytes or looks at addresses knows these two names; a record
        # holds K and V together.
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
        del self.slots, self.side

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
        """Rows are written by our attention backend only, transformed and still float32."""
        self._refuse("set_kv_buffer")

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots, codes and scales together."""
        self.slots.move(tgt_loc.long(), src_loc.long())

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of everything this pool allocated; SGLang asks for K and V, so the sides are split
        evenly."""
        total = self.slots.nbytes + self.side.nbytes
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
        """Speculative decoding is refused."""
        self._refuse("set_kv_buffer_prefix_valid")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"oscar-zoo INT2 KV cache: {what} is not supported")
