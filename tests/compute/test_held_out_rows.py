"""Which rows of held-out text are kept, from a real model and from planted ones."""

import math
from collections.abc import Iterator

import pytest
import torch
from tiny_models import EXAMPLE
from torch import Tensor

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.capture import rows as module
from oscar_zoo.compute.capture.rows import EVEN, FOCUSED, HeldOutRows, collect
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.models.attention import Softmax
from oscar_zoo.models.loading import LoadedModel, load_model

WINDOWS = Windows(sink=4, recent=6)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    yield load_model(str(EXAMPLE), dtype="float32")


def empty() -> HeldOutRows:
    return HeldOutRows(WINDOWS, CPU, lambda layer: torch.eye(8))


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(h, tokens, 4, generator=draw) for h in (4, 2, 2))  # type: ignore[return-value]


def test_short_sequences_are_kept_whole() -> None:
    kept = empty()
    query, key, value = rows(40)
    kept.add(3, query, key, value, Softmax(0.5))
    layer = kept(3)
    (one,) = layer.sequences
    for queries in (one.even, one.focused):
        assert queries.positions.tolist() == list(range(10, 40))
        assert torch.equal(queries.rows, query[:, 10:])
    assert torch.equal(one.key, key) and torch.equal(one.value, value)
    assert layer.softmax.scaling == 0.5 and torch.equal(layer.o_proj, torch.eye(8))


@pytest.mark.parametrize("at_once", [1 << 23, 4 * 600 * 50])
def test_of_long_sequences_spaced_and_focused_queries_are_kept(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(module, "SCORES_AT_ONCE", at_once)
    query, key, value = rows(600)
    query[1, 333] = 40 * key[0, 77]  # head 1 reads KV head 0
    query[2, 444] = 40 * key[1, 442]  # inside the recent window: no history
    kept = empty()
    kept.add(0, query, key, value, Softmax(1.0))
    one = kept(0).sequences[0]
    assert one.even.positions.diff().unique().tolist() == [-(-590 // EVEN)]
    assert EVEN / 2 < len(one.even.positions) <= EVEN
    assert len(one.focused.positions) == FOCUSED
    assert 333 in one.focused.positions.tolist()
    for queries in (one.even, one.focused):
        assert queries.positions.tolist() == sorted(queries.positions.tolist())
        assert torch.equal(queries.rows, query[:, queries.positions])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_rows_that_are_not_finite_name_the_layer(which: int, bad: float) -> None:
    broken = rows(20)
    broken[which][1, 5, 2] = bad
    with pytest.raises(
        ComputeFailed, match=f"layer 11 gives {('query', 'key', 'value')[which]} rows"
    ):
        empty().add(11, *broken, Softmax(1.0))


def test_rows_of_a_model_are_collected_layer_by_layer(loaded: LoadedModel) -> None:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 2048, (n,), generator=draw).tolist() for n in (60, 25)]
    before = loaded.model.config._attn_implementation
    kept = collect(loaded, ids, WINDOWS)
    assert loaded.model.config._attn_implementation == before
    block = loaded.block
    for layer_id in block.attention_layers:
        layer = kept(layer_id)
        assert [one.key.shape for one in layer.sequences] == [
            (block.num_kv_heads, n, block.head_dim) for n in (60, 25)
        ]
        assert [len(one.even.positions) for one in layer.sequences] == [50, 15]
        assert [len(one.focused.positions) for one in layer.sequences] == [50, 15]
        weights = loaded.model.model.layers[layer_id].self_attn.o_proj.weight
        assert torch.equal(layer.o_proj, weights)
        assert layer.softmax.scaling == pytest.approx(block.head_dim**-0.5)
