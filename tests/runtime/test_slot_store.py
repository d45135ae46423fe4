"""Codes in slots: the bytes of the one quantizer, moves of whole slots, and byte counts."""

from __future__ import annotations

import pytest
import torch

from oscar_kernels import quantizer
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore

K, V = QuantSpec(64, 64, 0.96), QuantSpec(32, 16, 0.92)


def make(mode: str = "int2") -> SlotStore:
    return SlotStore(SlotShape(2, 20, 3, K, V), "cpu", mode)


def some(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 3, 64, generator=g), torch.randn(tokens, 3, 32, generator=g)


def test_slots_hold_what_the_quantizer_says() -> None:
    store, (k, v), slots = make(), some(), torch.tensor([7, 3, 19, 1, 0])
    store.write(1, slots, k, v)
    packed, affine = quantizer.quantize(k, K)
    assert torch.equal(store.k_codes[1][slots], packed) and torch.equal(
        store.k_affine[1][slots], affine
    )
    got_k, got_v = store.read(1, slots)
    assert torch.equal(got_k, quantizer.fake_quantize(k, K)) and torch.equal(
        got_v, quantizer.fake_quantize(v, V)
    )
    untouched = [i for i in range(20) if i not in slots]
    assert not any(buffer[untouched].any() for buffer in store.buffers())
    assert not store.k_codes[0].any()


def test_lossless_mode_reads_exact_rows_and_still_writes_codes() -> None:
    store, (k, v), slots = make("lossless"), some(), torch.arange(5)
    store.write(0, slots, k, v)
    assert torch.equal(store.read(0, slots)[0], k) and torch.equal(store.read(0, slots)[1], v)
    assert torch.equal(store.k_codes[0][slots], quantizer.quantize(k, K)[0])


def test_poison_has_nothing_of_the_row() -> None:
    store, (k, v), slots = make("poison"), some(), torch.arange(5)
    store.write(0, slots, k, v)
    assert (store.read(0, slots)[0] == 7.0).all() and (store.read(0, slots)[1] == 7.0).all()


@pytest.mark.parametrize("mode", ["int2", "lossless"])
def test_moving_slots_moves_everything(mode: str) -> None:
    store, (k, v) = make(mode), some()
    for layer in (0, 1):
        store.write(layer, torch.arange(5), k + layer, v - layer)
    store.move(torch.tensor([10, 11]), torch.tensor([3, 1]))
    for layer in (0, 1):
        for moved, original in zip(
            store.read(layer, torch.tensor([10, 11])),
            store.read(layer, torch.tensor([3, 1])),
            strict=True,
        ):
            assert torch.equal(moved, original) and moved.any()


@pytest.mark.parametrize("mode", ["int2", "lossless"])
def test_bytes_are_counted_before_they_are_allocated(mode: str) -> None:
    store = make(mode)
    assert store.nbytes == 20 * store.shape.token_bytes(mode)


def test_the_numbers_of_the_design() -> None:
    """Qwen3-8B: 36 layers, 8 KV heads, head_dim 128: 20,736 bytes per token, 2.25 bits per
    element."""
    spec = QuantSpec(128, 128, 0.96)
    token = SlotShape(36, 0, 8, spec, spec).token_bytes()
    assert token == 20_736
    assert 8 * token / (36 * 8 * 2 * 128) == 2.25
