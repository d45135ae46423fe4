"""Sums of products against float64, however rows lie in memory and whatever multiplies them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from oscar_zoo.compute import products

HEADS, GROUP, WIDTH = 2, 3, 16
EXACT, SHORT = 1e-12, 5e-6
LENGTHS = (1, 5, 512, 1025, 2600, 9001)


@dataclass(frozen=True)
class Sums:
    """All that `products` adds up, from rows of two KV heads and six query heads."""

    gram: Tensor
    key_sum: Tensor
    weighted: Tensor
    weights: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, target: Tensor) -> Sums:
        sums = cls(
            *(torch.zeros(shape, dtype=torch.float64, device=key.device) for shape in SHAPES)
        )
        products.add_gram(sums.gram, query)
        products.add_sum(sums.key_sum, key)
        products.add_weighted_gram(sums.weighted, sums.weights, key, value, target)
        return sums

    @classmethod
    def directly(cls, query: Tensor, key: Tensor, value: Tensor, target: Tensor) -> Sums:
        query, key, value = (x.double() for x in (query, key, value))
        query = query.reshape(HEADS, -1, WIDTH)
        weight = torch.einsum("hti,hij,htj->ht", key, target, key)
        weighted = torch.einsum("ht,hti,htj->hij", weight, value, value)
        return cls(query.mT @ query, key.sum(1), weighted, weight.sum(1))

    def assert_close(self, want: Sums, key: Tensor, relative: float) -> None:
        for name in ("gram", "weighted", "weights"):
            one, other = getattr(self, name), getattr(want, name)
            assert float((one - other).abs().max() / other.abs().max()) <= relative, name
        error = (self.key_sum - want.key_sum).abs().max() / key.double().abs().sum(
            1
        ).max()  # terms cancel
        assert float(error) <= relative, "key_sum"


SHAPES = ((HEADS, WIDTH, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH, WIDTH), (HEADS,))


def rows(
    tokens: int, dtype: torch.dtype, *, inside: bool, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """q, k, v and a target; heads side by side in a token, as models keep them, or one head after
    the other."""
    generator = torch.Generator().manual_seed(tokens)
    scale = torch.logspace(-2, 2, WIDTH)  # channels as unequal as those of real keys
    q, k, v = (
        torch.randn(tokens, n, WIDTH, generator=generator) * scale
        for n in (HEADS * GROUP, HEADS, HEADS)
    )
    query, key, value = (x.to(device, dtype).transpose(0, 1) for x in (q, k, v))
    target = torch.einsum("hti,htj->hij", *[query.double().reshape(HEADS, -1, WIDTH)] * 2) / tokens
    return (
        (query, key, value, target)
        if inside
        else (*(x.contiguous() for x in (query, key, value)), target)
    )


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_processor_sums_exactly(tokens: int, dtype: torch.dtype, inside: bool) -> None:
    given = rows(tokens, dtype, inside=inside)
    Sums.of(*given).assert_close(Sums.directly(*given), given[1], EXACT)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_gpu_takes_every_row_once(
    monkeypatch: pytest.MonkeyPatch, tokens: int, inside: bool
) -> None:
    """Its way through the rows, with the products of a processor in place of those of its matrix
    units."""
    monkeypatch.setattr(products, "accumulation", lambda rows: "float32-chunked")
    monkeypatch.setattr(products, "_multiply", lambda x, y: x.float().mT @ y.float())
    given = rows(tokens, torch.bfloat16, inside=inside)
    Sums.of(*given).assert_close(Sums.directly(*given), given[1], SHORT)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_gpu_sums_as_closely_as_it_says(tokens: int, dtype: torch.dtype, inside: bool) -> None:
    given = rows(tokens, dtype, inside=inside, device="cuda")
    short = products.accumulation(given[1]) != "float64"
    Sums.of(*given).assert_close(Sums.directly(*given), given[1], SHORT if short else EXACT)
