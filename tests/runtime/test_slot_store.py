"""Codes in slots: the bytes of the one quantizer, moves of whole slots, and byte counts."""

import os
from pathlib import Path

import torch
from torch import Tensor

from oscar_kernels import quantizer
from oscar_kernels.cache import TokenTargets, Transforms
from oscar_kernels.reference import stored_rows
from oscar_kernels.spec import QuantSpec, code_bytes
from oscar_zoo.runtime.dispatch import REFERENCES
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore

K, V = QuantSpec(64, 64, 0.96), QuantSpec(32, 16, 0.92)
WINDOWS = WindowStore(WindowShape(2, 2, 3, 64, 32, 0, 1, torch.float32), "cpu")
NOTHING = Transforms(*(torch.eye(dim)[None] for dim in (64, 64, 32, 32)))


def make() -> SlotStore:
    return SlotStore(SlotShape.alike(2, 20, 3, K, V), "cpu")


def some(tokens: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 3, 64, generator=g), torch.randn(tokens, 3, 32, generator=g)


def write(store: SlotStore, layer: int, slots: Tensor, rows: tuple[Tensor, Tensor]) -> None:
    """Write rows as they are, without windows."""
    place = torch.zeros(len(slots), dtype=torch.int64)
    REFERENCES.write(
        *rows,
        store.layer(layer, WINDOWS),
        NOTHING,
        TokenTargets(slots, place, place, place + 1),
        windows=WINDOWS.state,
        parts="slots",
    )


def test_slots_hold_what_the_quantizer_says() -> None:
    store, (k, v), slots = make(), some(), torch.tensor([7, 3, 19, 1, 0])
    write(store, 1, slots, (k, v))
    packed, affine = quantizer.quantize(k, K)
    assert torch.equal(store.codes[1][slots][..., : code_bytes(K)], packed)
    assert torch.equal(store.affine[1][slots][..., :2], affine.flatten(-2))
    got_k, got_v = stored_rows(store.layer(1, WINDOWS), slots)
    assert torch.equal(got_k, quantizer.fake_quantize(k, K))
    assert torch.equal(got_v, quantizer.fake_quantize(v, V))
    untouched = [i for i in range(20) if i not in slots]
    assert not any(buffer[untouched].any() for buffer in store.buffers())
    assert not store.codes[0].any()


def test_moving_slots_moves_everything() -> None:
    store, (k, v) = make(), some()
    for layer in (0, 1):
        write(store, layer, torch.arange(5), (k + layer, v - layer))
    store.move(torch.tensor([10, 11]), torch.tensor([3, 1]))
    for layer in (0, 1):
        cache = store.layer(layer, WINDOWS)
        moved, original = (stored_rows(cache, torch.tensor(at)) for at in ([10, 11], [3, 1]))
        for one, other in zip(moved, original, strict=True):
            assert torch.equal(one, other) and one.any()
        assert all(buffer[[10, 11]].equal(buffer[[3, 1]]) for buffer in store.buffers())


def test_bytes_are_counted_before_they_are_allocated() -> None:
    store = make()
    assert store.nbytes == 20 * store.shape.token_bytes()


def test_the_numbers_of_the_design() -> None:
    """Qwen3-8B: 36 layers, 8 KV heads, head_dim 128: 20,736 bytes per token, 2.25 bits per
    element."""
    spec = QuantSpec(128, 128, 0.96)
    token = SlotShape.alike(36, 0, 8, spec, spec).token_bytes()
    assert token == 20_736
    assert 8 * token / (36 * 8 * 2 * 128) == 2.25


def test_a_store_on_a_cpu_takes_memory_when_it_is_written() -> None:
    before = resident()
    store = SlotStore(SlotShape.alike(1, 40_000_000, 3, K, V), "cpu")
    assert store.nbytes > 4e9 and resident() - before < 1e9
    last = torch.tensor([39_999_999])
    write(store, 0, last, some(1))
    assert store.codes[0][last].any() and not store.codes[0][last - 1].any()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_every_layer_begins_where_kernels_can_read_it() -> None:
    """They read 16 bytes at once, and an odd number of slots may have 8 more."""
    spec = QuantSpec(128, 128)
    store = SlotStore(SlotShape.alike(3, 21, 1, spec, spec), "cpu")
    assert [one.data_ptr() % 16 for one in store.buffers()] == [0] * 6
