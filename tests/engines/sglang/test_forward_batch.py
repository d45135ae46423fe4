"""From SGLang's batch and model runner, plain objects here, to what the INT2 cache takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_zoo.engines.sglang.compat import geometry, radix_attention
from oscar_zoo.engines.sglang.compat.forward_batch import step_input
from oscar_zoo.errors import UnsupportedModel

ROWS, LENGTHS, SLOTS = torch.tensor([1, 3]), torch.tensor([24, 10]), torch.arange(10)


@pytest.fixture(autouse=True)
def plain_locations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_attention, "write_location", lambda location: location)


def batch(*, extend: bool, **fields: Any) -> Any:
    return SimpleNamespace(
        req_pool_indices=ROWS,
        seq_lens=LENGTHS,
        out_cache_loc=SLOTS,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        **fields,
    )


def test_an_extend_knows_its_rows_and_lengths_on_the_host() -> None:
    numbers = {"extend_prefix_lens_cpu": [20, 7], "extend_seq_lens_cpu": torch.tensor([4, 3])}
    step = step_input(batch(extend=True, **numbers))
    assert step.kind == "extend" and step.request_rows == (1, 3)
    assert step.prefix_lens == (20, 7) and step.extend_lens == (4, 3)
    assert step.out_loc.tolist() == list(range(7))  # what lies behind is padding


def test_a_decode_step_holds_the_engines_own_buffers() -> None:
    step = step_input(batch(extend=False))
    assert step.kind == "decode" and step.prefix_lens == step.extend_lens == ()
    assert step.rows is ROWS and step.seq_lens is LENGTHS
    assert step.out_loc.data_ptr() == SLOTS.data_ptr() and len(step.out_loc) == 2


def runner(*scales: float) -> tuple[Any, Any]:
    layers = [SimpleNamespace(scaling=scale, tp_q_head_num=6) for scale in scales]
    pool = SimpleNamespace(
        start_layer=7,
        layer_num=2,
        device="cpu",
        windows=SimpleNamespace(shape=SimpleNamespace(num_rows=5)),
    )
    return SimpleNamespace(model=layers, model_config=SimpleNamespace(context_len=100)), pool


def test_the_configuration_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_attention, "attention_layers", iter)
    config = geometry.cache_config(*runner(0.1, 0.1))
    assert (config.layer_ids, config.num_q_heads, config.sm_scale) == (range(7, 9), 6, 0.1)
    assert (config.max_batch, config.piece_tokens) == (5, 0) and config.max_tokens >= 100


def test_layers_must_share_their_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_attention, "attention_layers", iter)
    with pytest.raises(UnsupportedModel, match="different scaling"):
        geometry.cache_config(*runner(0.1, 0.2))
