"""The INT2 cache of one attention layer as transformers asks for it, and the attention function
`oscar_int2`, which reads it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from oscar_kernels.cache import MOST_DRAFTS, Drafts
from oscar_kernels.decode_attention.launcher import LARGEST_GROUP
from oscar_zoo.engines.transformers.rows import LayerSpec, Rows, in_place
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.attention import BLOCKED, Softmax, exact_attention
from oscar_zoo.runtime import engine
from oscar_zoo.runtime.dispatch import KERNELS

if TYPE_CHECKING:
    from oscar_zoo.engines.transformers.cache import OscarCache

NAME = "oscar_int2"
MARK = "_oscar_layer"
"""Attribute of the very keys that a model hands from `update` to its attention function."""
CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
"""Whether this release says how many tokens stay; newer ones say how many go, as a negative
number."""


class OscarLayer(DynamicLayer):  # type: ignore[misc]
    """One attention layer of an `OscarCache`.

    With the attention function `oscar_int2`, `update` only keeps the new tokens, and `attend`
    does all else, because it has the queries and the mask: few tokens read codes. With any other
    one, and for many tokens, all rows of the layer are made, in the basis of the model.
    """

    def __init__(self, index: int, spec: LayerSpec, owner: OscarCache) -> None:
        super().__init__()
        self.index, self.spec, self.owner = index, spec, owner
        self.rows: Rows | None = None
        self._new: tuple[Tensor, Tensor] | None = None

    # What transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = Rows(self.spec, self.owner.steps, key_states)
        self.keys = self.values = key_states.new_empty(0)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return 0 if self.rows is None else self.rows.length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        self.owner.check_update(self, key_states, value_states)
        if self.rows is None:
            self.lazy_initialization(key_states, value_states)
        if self.owner.attends:
            self._new, self.owner.waiting = (key_states, value_states), self
            marked = key_states.view(key_states.shape)  # never a tensor of the caller
            setattr(marked, MARK, self)
            return marked, value_states
        with torch.cuda.device_of(key_states):  # kernels are launched on the current one
            return self._all_rows(key_states, value_states)

    def _all_rows(
        self, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens; gives keys and values of all, in the basis of the model."""
        rows, new = self._rows, key.shape[2]
        if not rows.length:
            if self.index == self.owner.block.attention_layers[0]:  # for all layers
                self.owner.steps.begin(len(key), mask)
            rows.write(key, value)
            return key, value
        # A token that is decoded counts itself in the window; a chunk reads the window before it.
        keys, values = rows.read(rows.length + 1 if new == 1 else rows.length, key.dtype)
        rows.write(key, value)
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)

    def crop(self, count: int) -> None:
        if self.rows is None:
            return
        length = count if CROPS_TO_LENGTH and count >= 0 else self.rows.length - abs(count)
        if length < self.rows.length:
            self.rows.crop(length)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rows is not None:
            if self.index == self.owner.block.attention_layers[0]:
                self.owner.steps.select(indices)
            self.rows.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows is not None:
            each = torch.arange(self.rows.batch, device="cpu")
            self.batch_select_indices(each.repeat_interleave(repeats))

    def reset(self) -> None:
        self.rows = self._new = self.keys = self.values = None
        self.is_initialized = False

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes

    @property
    def _rows(self) -> Rows:
        assert self.rows is not None
        return self.rows

    # Attention

    def attend(
        self, module: Any, query: Tensor, mask: Tensor | None, given: Mapping[str, Any]
    ) -> Tensor:
        """Write the tokens of the last `update`, and attend; `query` is `[B, num_q_heads, T,
        head_dim]`, the result `[B, T, num_q_heads, v_head_dim]`."""
        for name, what in BLOCKED.items():
            if given.get(name) is not None:
                raise UnsupportedModel(f"layer {self.index} uses {what}, which no INT2 cache has.")
        assert self._new is not None
        (key, value), self._new, self.owner.waiting = self._new, None, None
        softmax = Softmax.of_call(query, given)
        if self._reads_codes(query, softmax):
            return self._few(query, key, value, softmax)
        keys, values = self._all_rows(key, value, mask)
        found: Tensor = exact_attention(module, query, keys, values, mask, **given)[0]
        return found

    def _reads_codes(self, query: Tensor, softmax: Softmax) -> bool:
        """Whether new tokens are few behind others, none of them is padding, and kernels know how
        they attend; they know no cap on keys that lack their mean."""
        rows, (_, heads, new, _) = self._rows, query.shape
        return (
            0 < rows.length >= max(self.owner.steps.pads)
            and new <= min(MOST_DRAFTS, rows.store.recent)
            and (heads // rows.store.num_kv_heads <= LARGEST_GROUP or rows.ops is not KERNELS)
            and (softmax.cap is None or rows.spec.transforms.k_mean is None)
        )

    @in_place
    def _few(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Tokens that each read what they would read if they had come one by one."""
        rows, (batch, heads, new, _) = self._rows, query.shape
        turned, transforms = rows.write(key, value, query), rows.spec.transforms
        assert turned is not None
        by_sequence = turned.unflatten(0, (new, batch)).transpose(0, 1).flatten(0, 1)
        own = engine.Softmax(softmax.scaling, softmax.cap or 0.0, softmax.sinks)
        plain = query.transpose(1, 2).flatten(0, 1)
        chain: dict[str, Any] = {"drafts": Drafts(new)} if new > 1 else {"prefix_stable": True}
        first = self.index == self.owner.block.attention_layers[0]
        out = rows.ops.decode(
            by_sequence.contiguous(), rows.store, rows.view(), sm_scale=own.scale,
            logit_cap=own.cap, sink_logits=own.sink_logits(plain, transforms.k_mean),
            o_partner=transforms.o_partner, workspace=self.owner.workspace(rows, heads, new),
            same_batch=self.owner.steps.attends_again(rows.device, first=first), **chain,
        )  # fmt: skip
        return out.unflatten(0, (batch, new)).to(query.dtype)


def oscar_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **rest: Any
) -> tuple[Tensor, None]:
    """Exact for what is no layer of an `OscarCache`, such as sliding windows and other caches."""
    layer = getattr(key, MARK, None)
    if layer is None:
        return exact_attention(module, query, key, value, attention_mask, **rest)
    with torch.cuda.device_of(query):
        return layer.attend(module, query, attention_mask, rest), None


AttentionInterface.register(NAME, oscar_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # else sliding layers get no mask


def with_state(stock: Any, layer: OscarLayer) -> Any:
    """A layer with attention and a state, as Falcon-H1 has: the state stays as in `stock`."""
    linear: Any = next(one for one in type(stock).__mro__[1:] if not issubclass(one, DynamicLayer))

    class Both(OscarLayer, linear):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.__dict__.update(layer.__dict__ | stock.__dict__)

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            (OscarLayer if args else linear).lazy_initialization(self, *args, **kwargs)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            linear.reorder_cache(self, beam_idx)
            OscarLayer.reorder_cache(self, beam_idx)

        def crop(self, count: int) -> None:
            linear.crop(self, count)
            OscarLayer.crop(self, count)

        def reset(self) -> None:
            linear.reset(self)
            OscarLayer.reset(self)

    return Both()
