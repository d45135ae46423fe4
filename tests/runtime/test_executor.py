"""The kernels inside the cache: the same steps by the kernels and by their references give the
same attention.

The kernels are interpreted in float32 without a GPU. Requests of different lengths are prefilled in
chunks, extended by a few tokens and decoded together, with transforms that are no rotations and
with keys that are centred.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cache_oracle import PlainPrefill
from small_caches import Both, CacheShape

from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.spec import PLAIN as PLAIN_BITS
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import int2_cache
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import Softmax

HEADS, GROUP, DIM, SINK, RECENT = 2, 3, 32, 4, 8
SHAPE = CacheShape(
    idle=2, group=GROUP, sink=SINK, recent=RECENT, piece=7, rows=5, slots=300, longest=128
)
STORES = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")
PLAIN = Softmax(DIM**-0.5)
SINKS = torch.linspace(-2.0, 3.0, HEADS * GROUP)


@pytest.mark.parametrize(
    "softmax",
    [PLAIN, Softmax(DIM**-0.5, sinks=SINKS), Softmax(DIM**-0.5, cap=1.5)],
    ids=["plain", "learned sinks", "cap"],
)
@pytest.mark.parametrize(
    "short", [256, 1], ids=["short extends by themselves", "by pieces of prefix"]
)
def test_kernels_and_references_give_the_same_attention(
    short: int, softmax: Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int2_cache, "SHORT", short)
    both = Both(replace(SHAPE, softmax=softmax), PlainPrefill(), seed=5)
    for row in (1, 3):
        both.begin(row)
    assert both.step({1: 21, 3: 2}) < 1e-5  # no prefix
    assert both.step({3: 17, 1: 5}) < 1e-4  # chunks over their own prefix
    both.begin(4, shared_with=1, prefix=19)
    windows = both.kernels.windows
    first = windows.sink_k[0, int(windows.sink_block[1])].clone()
    assert both.step({4: 3, 1: 1}) < 1e-4  # a prefix of another, and a decode row of a mixed batch
    for _ in range(4):
        assert both.step({1: 1, 3: 1, 4: 1}, decode=True) < 1e-4
    both.check_stores()
    assert windows.sink_k[0, int(windows.sink_block[4])].equal(first)  # nobody wrote there again


def test_latents_and_their_references_give_the_same_attention() -> None:
    """Prompts are read back as latents in 16 bits, however short."""
    specs = QuantSpec(128, 64, 0.9), QuantSpec(32, 32, bits=PLAIN_BITS)
    shape = replace(SHAPE, heads=1, group=5, specs=specs, longest=64)
    both = Both(shape, PlainPrefill(), seed=5)
    for row in (1, 3):
        both.begin(row)
    for new in ({1: 21, 3: 2}, {3: 9, 1: 5}):
        assert both.step(new) < 1e-4
        assert both.adopt_codes() < 0.005
    both.begin(4, shared_with=1, prefix=19)
    assert both.step({4: 3, 1: 1}) < 1e-4 and both.adopt_codes() < 0.005
    for _ in range(2):
        assert both.step({1: 1, 3: 1, 4: 1}, decode=True) < 1e-4
        assert both.adopt_codes() < 0.005


@pytest.mark.parametrize("recent", [1, 8])
def test_attention_that_may_start_before_a_write_ends_reads_its_newest_row(recent: int) -> None:
    early = list[LayerCache]()
    checked = 0

    def write(k: Tensor, v: Tensor, cache: LayerCache, *others: Any, **options: Any) -> None:
        early.append(replace(cache, **{name: getattr(cache, name).clone() for name in STORES}))
        KERNELS.write(k, v, cache, *others, **options)

    def attention(
        query: Tensor, cache: LayerCache, view: BatchView, *, prefix_stable: bool, **options: Any
    ) -> Tensor:
        nonlocal checked
        out = KERNELS.decode(query, cache, view, prefix_stable=prefix_stable, **options).clone()
        assert prefix_stable, "a step that waits for the whole write is slower"
        before = early.pop()
        last = view.kv_indptr.diff()[: len(view.rows)] - 1
        blocks = view.windows.sink_block[view.rows]
        for side in "kv":
            ring, sink = f"ring_{side}", f"sink_{side}"
            getattr(before, ring)[view.rows, last % recent] = getattr(cache, ring)[
                view.rows, last % recent
            ]
            new, at = blocks[last < SINK], last[last < SINK]
            getattr(before, sink)[new, at] = getattr(cache, sink)[new, at]
        again = KERNELS.decode(query, before, view, prefix_stable=prefix_stable, **options)
        assert torch.equal(again, out)
        checked += 1
        return out

    both = Both(
        replace(SHAPE, recent=recent),
        PlainPrefill(),
        seed=8,
        kernels=replace(KERNELS, write=write, decode=attention),
    )
    for row in (1, 3):
        both.begin(row)
    both.step({1: 21, 3: 3})
    for _ in range(2):  # the newest token of one request is a sink at first
        both.step({1: 1, 3: 1}, decode=True)
    assert checked == 2


def test_the_comparison_sees_a_partner_that_is_wrong() -> None:
    both = Both(SHAPE, PlainPrefill(), seed=6)
    made = both.kernels
    wrong = made.transforms[0]
    made.transforms = (replace(wrong, q_partner=wrong.k_forward),)
    both.begin(1)
    both.step({1: 30})
    assert both.step({1: 1}, decode=True) > 1e-2
