"""Deliberate bugs that the suite must notice; a suite that passes with one of them tests
nothing."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oscar_kernels import reference as attention_reference
from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.reference import window_start
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.sink_blocks import Place, PromptKey, SinkBlocks
from oscar_zoo.runtime.stores import SlotStore, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

NAMES = (
    "clip_one_rank_lower",
    "codes_alone",
    "every_draft_seen",
    "no_ring_start",
    "no_wait",
    "first_wait",
    "one_layer",
    "one_sliding_window",
    "partner_is_forward",
    "publish_early",
    "ring_before_attention",
    "rings_not_committed",
    "rot",
    "several_chains",
    "sinks_not_committed",
    "small_ring",
    "stock_window",
    "swapped_layers",
    "window_of_the_first_draft",
    "without_tree",
    "wrong_slots",
)


class EarlySinks(SinkBlocks):
    """A block is shared as soon as it has an owner, with holes."""

    def _own(self, row: int, prompt: PromptKey, *rest: Any) -> Place:
        place = super()._own(row, prompt, *rest)
        self._publish(self._rows[row], prompt.key(self.width))
        return place


def rot(store: SlotStore) -> None:
    """All that slots hold is lost, once, when the file `INT2_TEST_ROT` is there."""

    def wait() -> None:
        while not Path(os.environ["INT2_TEST_ROT"]).exists():
            time.sleep(0.05)
        for buffer in store.buffers():
            buffer.zero_()

    threading.Thread(target=wait, daemon=True).start()


def wrong_slots() -> None:
    """Layers with a sliding window look for their tokens where the other layers have them."""
    from oscar_zoo.engines.sglang.backend import SlidingOnCpu

    def slots(self: Any, row: int, first: int, last: int) -> Any:
        return self.req_to_token_pool.req_to_token[row, first:last].long()

    SlidingOnCpu.slots = slots


def sliding_drafts(mutant: str) -> None:
    """Drafts in layers with a sliding window all have the window of the first one, or see what
    comes after them."""
    from oscar_zoo.engines.sglang.backend import SlidingOnCpu

    right = SlidingOnCpu.seen

    def seen(self: Any, asking: Tensor, positions: Tensor, window: int) -> Tensor:
        found = right(self, asking, positions, window)
        if self._step.drafts is None:
            return found
        if mutant == "one_sliding_window":
            return (positions <= asking) & (positions >= asking[0] - window)
        return positions >= asking - window

    SlidingOnCpu.seen = seen


def late_pages(mutant: str) -> None:
    """Layers of pages come back from the host as late as SGLang allows, when somebody waits for
    them. On a CPU a copy is done before anybody could be too early, so nothing else would miss a
    wait. Mutants: nobody waits, the first layer alone is waited for, and records that hold codes
    alone."""
    from sglang.srt.managers.cache_controller import LayerDoneCounter, LayerLoadingEvent

    from oscar_zoo.engines.sglang.compat.host_pool import Int2HostPool
    from oscar_zoo.runtime import host_pages
    from oscar_zoo.runtime.host_pages import HostPages

    host_pages.LAYERS = 1
    load, make = Int2HostPool.load_to_device_per_layer, HostPages.__init__
    late: list[Callable[[], None] | tuple[Any, int]] = []
    """Copies, and which layer of whose is then done."""

    def later(self: Any, *given: Any, **named: Any) -> None:
        late.append(lambda: load(self, *given, **named))

    def wait(self: Any, layer_index: int) -> None:
        while (self, layer_index) in late:
            copy = late.pop(0)
            if callable(copy):
                copy()

    def codes_alone(self: Any, *given: Any) -> None:
        make(self, *given)
        for part in self._parts:
            part.slots[1:] = [one.clone() for one in part.slots[1:]]

    Int2HostPool.load_to_device_per_layer = later
    LayerLoadingEvent.complete = lambda self, layer_index: late.append((self, layer_index))
    LayerLoadingEvent.wait = wait
    if mutant == "no_wait":
        LayerDoneCounter.wait_until = lambda self, threshold: None
    if mutant == "first_wait":
        until = LayerDoneCounter.wait_until
        LayerDoneCounter.wait_until = lambda self, threshold: until(self, 0)
    if mutant == "codes_alone":
        HostPages.__init__ = codes_alone


def several_chains() -> None:
    """Drafts of n-grams stay as SGLang's table makes them."""
    from oscar_zoo.engines.sglang.hooks import installation

    installation.longest_chains = lambda *found: found


def stock_window() -> None:
    """SGLang's backend for layers with a sliding window is left as it is."""
    from oscar_zoo.engines.sglang.compat import backends

    backends.whole_windows = lambda backend, window: backend


SLIDING_DRAFTS = ("one_sliding_window", "every_draft_seen")
"""Mutants of `sliding_drafts`."""


def partner_is_forward(table: TransformTable) -> TransformTable:
    """A general pair is loaded as if it were a rotation."""
    return TransformTable(
        tuple(
            replace(layer, q_partner=layer.k_forward, o_partner=layer.v_forward)
            for layer in table.layers
        )
    )


def broken(ops: Ops, mutant: str) -> Ops:
    """`ops` with a bug, if `mutant` is one of theirs."""
    if mutant == "ring_before_attention":
        return replace(ops, write=_everything(ops.write))
    if mutant == "no_ring_start":
        return replace(ops, decode=_whole_ring(ops.decode), extend=_whole_ring(ops.extend))
    if mutant == "window_of_the_first_draft":
        return replace(ops, decode=_one_window(ops.decode))
    if mutant == "without_tree":
        return replace(ops, decode=_chain(ops.decode))
    if mutant == "rings_not_committed":
        return replace(ops, make_commit=_committing(ops, ring_k=_empty_rows, ring_v=_empty_rows))
    if mutant == "sinks_not_committed":
        return replace(ops, make_commit=_committing(ops, sink_k=_no_rows, sink_v=_no_rows))
    return ops


def _everything(write: Callable[..., Any]) -> Callable[..., Any]:
    """Rings and sinks are written before an extend reads them."""

    def at_once(*args: Any, parts: str = "all", **options: Any) -> Any:
        return write(*args, parts="all" if parts == "slots" else parts, **options)

    return at_once


def small_ring(windows: WindowStore) -> None:
    """A ring has no room for drafts that are rejected."""
    recent = windows.shape.recent
    windows.ring_k, windows.ring_v = (
        ring[:, :, :recent].clone() for ring in (windows.ring_k, windows.ring_v)
    )


def _one_window(decode: Callable[..., Any]) -> Callable[..., Any]:
    """All drafts of a request read what the first one reads."""

    def of_the_first(tokens: Tensor, *given: Any) -> Tensor:
        return window_start(tokens[:1], *given)

    def read(*args: Any, **options: Any) -> Any:
        with mock.patch.object(attention_reference, "window_start", of_the_first):
            return decode(*args, **options)

    return read


def _chain(decode: Callable[..., Any]) -> Callable[..., Any]:
    """A draft sees all drafts in front of it."""

    def read(*args: Any, drafts: Drafts | None = None, **options: Any) -> Any:
        return decode(*args, drafts=None if drafts is None else Drafts(drafts.count), **options)

    return read


def _committing(ops: Ops, **changed: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Accepted drafts are copied to other tensors than those of the caches."""

    def make(caches: Sequence[LayerCache]) -> Callable[..., None]:
        return ops.make_commit(
            [
                replace(cache, **{name: of(getattr(cache, name)) for name, of in changed.items()})
                for cache in caches
            ]
        )

    return make


def _empty_rows(ring: Tensor) -> Tensor:
    return torch.zeros_like(ring)


def _no_rows(sinks: Tensor) -> Tensor:
    return sinks[:, :0]


def _whole_ring(op: Callable[..., Any]) -> Callable[..., Any]:
    """A query takes its whole window from the ring, also what an earlier owner of the row wrote."""

    def read(*args: Any, **options: Any) -> Any:
        return op(*(_without_start(x) if isinstance(x, BatchView) else x for x in args), **options)

    return read


def _without_start(view: BatchView) -> BatchView:
    none = view.windows.ring_start.new_zeros(view.windows.ring_start.shape)
    return replace(view, windows=replace(view.windows, ring_start=none))


def clip_one_rank_lower() -> None:
    """The threshold is the element below the one that the specification names."""
    real = QuantSpec.__dict__["clip_index"]
    QuantSpec.clip_index = property(lambda spec: real.fget(spec) - 1)
