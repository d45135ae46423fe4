"""Sums of products against float64, however rows lie in memory and whatever multiplies them."""

import pytest
import torch
from torch import Tensor

from oscar_zoo.compute import products

HEADS, GROUP, WIDTH = 2, 3, 16
EXACT, SHORT = 1e-12, 5e-6
LENGTHS = (1, 5, 512, 1025, 2600, 9001)


Given = tuple[Tensor, ...]
"""q, k, v and a target, of two KV heads and six query heads."""


def summed(query: Tensor, key: Tensor, value: Tensor, target: Tensor) -> Given:
    """All that `products` adds up."""
    width, heads = (WIDTH, WIDTH), (HEADS,)
    gram, key_sum, weighted, weights = (
        torch.zeros(heads + shape, dtype=torch.float64, device=key.device)
        for shape in (width, (WIDTH,), width, ())
    )
    products.add_gram(gram, query)
    products.add_sum(key_sum, key)
    products.add_weighted_gram(weighted, weights, key, value, target)
    return gram, key_sum, weighted, weights


def assert_close(given: Given, relative: float) -> None:
    """To the sums in one piece; terms of the sum of keys cancel."""
    query, key, value, target = (x.double() for x in given)
    query = query.reshape(HEADS, -1, WIDTH)
    weight = torch.einsum("hti,hij,htj->ht", key, target, key)
    weighted = torch.einsum("ht,hti,htj->hij", weight, value, value)
    want = (query.mT @ query, key.sum(1), weighted, weight.sum(1))
    sizes = (want[0], key.abs().sum(1), weighted, want[3])
    for got, exact, size in zip(summed(*given), want, sizes, strict=True):
        assert float((got - exact).abs().max() / size.abs().max()) <= relative


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
    if not inside:
        query, key, value = (x.contiguous() for x in (query, key, value))
    return query, key, value, target


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_processor_sums_exactly(tokens: int, dtype: torch.dtype, inside: bool) -> None:
    assert_close(rows(tokens, dtype, inside=inside), EXACT)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_gpu_takes_rows_once(monkeypatch: pytest.MonkeyPatch, tokens: int, inside: bool) -> None:
    """Its way through the rows, with the products of a processor in place of those of its matrix
    units."""
    monkeypatch.setattr(products, "accumulation", lambda rows: "float32-chunked")
    monkeypatch.setattr(products, "_multiply", lambda x, y: x.float().mT @ y.float())
    assert_close(rows(tokens, torch.bfloat16, inside=inside), SHORT)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_gpu_sums_as_closely_as_it_says(tokens: int, dtype: torch.dtype, inside: bool) -> None:
    given = rows(tokens, dtype, inside=inside, device="cuda")
    short = products.accumulation(given[1]) != "float64"
    assert_close(given, SHORT if short else EXACT)
