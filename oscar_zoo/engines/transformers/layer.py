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
from oscar_kernels.reference import apply_o_partner
from oscar_zoo.engines.transformers import codes
from oscar_zoo.engines.transformers.rows import LayerSpec, Rows, in_place
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.attention import BLOCKED, Softmax, attend, exact_attention
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
    does all else, because it has the queries and the mask. With any other one `update` gives all
    rows in the model's own basis.
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

    def _all_rows(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write new tokens; gives keys and values of all, in the basis of the model."""
        rows, new = self._rows, key_states.shape[2]
        if not rows.length:
            self._begin(len(key_states), None)
            rows.write(key_states, value_states)
            return key_states, value_states
        # A token that is decoded counts itself in the window; a chunk reads the window before it.
        old = rows.read(rows.length + 1 if new == 1 else rows.length, torch.float32)
        rows.write(key_states, value_states)
        keys, values = (x.to(key_states.dtype) for x in rows.restored(*old))
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def crop(self, count: int) -> None:
        if self.rows is None:
            return
        length = count if CROPS_TO_LENGTH and count >= 0 else self.rows.length - abs(count)
        if length < self.rows.length:
            self.rows.crop(length)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rows is not None:
            self.rows.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows is not None:
            each = torch.arange(self.rows.batch, device="cpu")
            self.rows.select(each.repeat_interleave(repeats))

    def reset(self) -> None:
        self.rows = self._new = self.keys = self.values = None
        self.is_initialized = False

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes

    def _begin(self, batch: int, mask: Tensor | None) -> None:
        if self.index == self.owner.block.attention_layers[0]:  # for all layers
            self.owner.steps.begin(batch, mask)

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
        rows, new = self._rows, query.shape[2]
        if not rows.length:
            self._begin(len(key), mask)
            rows.write(key, value)
            found: Tensor = exact_attention(module, query, key, value, mask, **given)[0]
            return found
        if new <= min(MOST_DRAFTS, rows.store.recent):
            return self._few(query, key, value, Softmax.of_call(query, given))
        return self._many(module, query, key, value, mask, given)

    @in_place
    def _few(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Tokens that each read what they would read if they had come one by one."""
        rows, (batch, heads, new, _) = self._rows, query.shape
        shift, partner = self._shift(query, softmax), rows.spec.transforms.o_partner
        kernels = rows.ops is KERNELS and heads // rows.store.num_kv_heads <= LARGEST_GROUP
        if kernels and shift is not None and softmax.cap is not None:
            raise UnsupportedModel("a soft cap does not go with keys that lack their mean.")
        turned = rows.write(key, value, query)
        assert turned is not None
        if not kernels or max(rows.steps.pads) > rows.length - new:  # some of them are padding
            rows.steps.need_host()
            out = codes.attend(rows, turned.unflatten(0, (new, batch)).float(), softmax, shift)
            out = apply_o_partner(out.flatten(0, 1), partner).unflatten(0, (new, batch))
            return out.transpose(0, 1).to(query.dtype)
        by_sequence = turned.unflatten(0, (new, batch)).transpose(0, 1).flatten(0, 1)
        own = engine.Softmax(softmax.scaling, softmax.cap or 0.0, softmax.sinks)
        plain = query.transpose(1, 2).flatten(0, 1)
        chain: dict[str, Any] = {"drafts": Drafts(new)} if new > 1 else {"prefix_stable": True}
        out = rows.ops.decode(
            by_sequence.contiguous(), rows.store, rows.view(), sm_scale=own.scale,
            logit_cap=own.cap, sink_logits=own.sink_logits(plain, rows.spec.transforms.k_mean),
            o_partner=partner, workspace=self.owner.workspace(rows, heads, new), **chain,
        )  # fmt: skip
        return out.unflatten(0, (batch, new)).to(query.dtype)

    def _many(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: Any
    ) -> Tensor:
        """A chunk, which reads its own tokens exactly and older ones as they are in the cache."""
        rows, t, softmax = self._rows, self._rows.spec.transforms, Softmax.of_call(query, given)
        old = rows.read(rows.length, key.dtype)
        rows.write(key, value)
        own = _turned(key, t.k_forward, t.k_mean), _turned(value, t.v_forward)
        keys, values = (torch.cat([x, y], 2) for x, y in zip(old, own, strict=True))
        moved, shift = _turned(query, t.q_partner), self._shift(query, softmax)
        if shift is None:
            out = exact_attention(module, moved, keys, values, mask, **given)[0].transpose(1, 2)
        else:
            out = attend(moved, keys, values, mask, softmax, shift=shift)
        return _turned(out, t.o_partner.mT).transpose(1, 2).contiguous()

    def _shift(self, query: Tensor, softmax: Softmax) -> Tensor | None:
        """What keys without their mean lack in the logits, `[B, num_q_heads, T, 1]`; a plain
        softmax ignores it."""
        mean = self._rows.spec.transforms.k_mean
        if mean is None or softmax.plain:
            return None
        own = mean.repeat_interleave(query.shape[1] // len(mean), 0)
        return softmax.scaling * (query.float() @ own[..., None])


def _turned(x: Tensor, matrix: Tensor, mean: Tensor | None = None) -> Tensor:
    """`[B, heads, T, d]` times a matrix of each KV head or of all, in the dtype of `x`."""
    wide = x.float().unflatten(1, (len(matrix), -1))
    wide = wide if mean is None else wide - mean.unflatten(0, (len(mean), 1))[:, :, None]
    return (wide @ matrix[:, None]).flatten(1, 2).to(x.dtype)


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
