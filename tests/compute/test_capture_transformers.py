"""The capture sees exactly the rows that attention sees, and stores none of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from random_qwen3 import write_model
from torch import Tensor

from oscar_zoo.compute.capture.transformers import TransformersCapture
from oscar_zoo.compute.estimators import estimate
from oscar_zoo.evaluate.models import LoadedModel, load_model

SEQUENCES = ((5, 9, 300, 17, 1200, 4, 4, 80), (7, 70, 700), tuple(range(100, 140)))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    yield load_model(str(write_model(tmp_path_factory.mktemp("model"))))


def attention_rows(loaded: LoadedModel, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one layer over all sequences, computed from hidden states with the layer's own modules."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    inner = loaded.model.model
    parts = []
    for sequence in SEQUENCES:
        ids = torch.tensor([sequence])
        with torch.inference_mode():
            hidden = inner(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[layer]
            block = inner.layers[layer]
            x, attention = block.input_layernorm(hidden), block.self_attn
            shape = (1, len(sequence), -1, attention.head_dim)
            q = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
            k = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
            v = attention.v_proj(x).view(shape).transpose(1, 2)
            cosine, sine = inner.rotary_emb(x, torch.arange(len(sequence))[None])
            q, k = apply_rotary_pos_emb(q, k, cosine, sine)
        parts.append((q[0].double(), k[0].double(), v[0].double()))
    q, k, v = (torch.cat(rows, 1) for rows in zip(*parts, strict=True))
    return q, k, v


@pytest.mark.parametrize("layer", [0, 1])
def test_moments_are_those_of_the_rows(loaded: LoadedModel, layer: int) -> None:
    moments = TransformersCapture(loaded).capture(SEQUENCES, weighted=True)
    moments.check_coverage(frozenset({"rows", "weighted"}))
    query, key, value = attention_rows(loaded, layer)
    tokens, group = key.shape[1], query.shape[0] // key.shape[0]
    for head in range(key.shape[0]):
        q = query[head * group : (head + 1) * group].reshape(-1, query.shape[-1])
        a = q.T @ q / (tokens * group)
        weights = torch.einsum("td,de,te->t", key[head], a, key[head])
        c = torch.einsum("t,ti,tj->ij", weights, value[head], value[head]) / weights.sum()
        # the model runs in float32, and batch shapes differ between the two computations
        for name, want in (("qqt/1", a), ("sst/1", c), ("kk/1", key[head].T @ key[head] / tokens)):
            got = estimate(moments, name, "kv_head")[layer, head]
            assert np.abs(got - want.numpy()).max() <= 1e-5 * float(want.abs().max())


def test_two_captures_are_equal_to_the_bit(loaded: LoadedModel) -> None:
    first, second = (TransformersCapture(loaded).capture(SEQUENCES, weighted=True) for _ in range(2))
    for layer in first.layers:
        for name in ("qq", "kk", "vv", "sst_num", "sst_den"):
            assert torch.equal(getattr(first.layers[layer], name), getattr(second.layers[layer], name))


def test_the_model_computes_as_before(loaded: LoadedModel) -> None:
    ids = torch.tensor([SEQUENCES[0]])
    with torch.inference_mode():
        before = loaded.model(input_ids=ids).logits
        TransformersCapture(loaded).capture(SEQUENCES, weighted=False)
        assert torch.equal(loaded.model(input_ids=ids).logits, before)


def test_progress_counts_the_tokens_of_each_pass(loaded: LoadedModel) -> None:
    seen: list[tuple[int, int, str]] = []
    TransformersCapture(loaded).capture(SEQUENCES, weighted=True, progress=lambda *news: seen.append(news))
    total = sum(map(len, SEQUENCES))
    steps = [0, 8, 11, total]
    assert seen == [(n, total, phase) for phase in ("moments", "weights") for n in steps]
