"""From SGLang's batch and model runner, plain objects here, to what the INT2 cache takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import Drafts
from oscar_zoo.engines.sglang.compat import geometry
from oscar_zoo.engines.sglang.compat.forward_batch import step_input
from oscar_zoo.errors import ServerFailed, UnsupportedModel, UsageError
from oscar_zoo.runtime.batch import ancestors

ROWS, LENGTHS, SLOTS = torch.tensor([1, 3]), torch.tensor([24, 10]), torch.arange(10)


@pytest.fixture(autouse=True)
def plain_locations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "write_location", lambda location: location)


def batch(*, extend: bool, **fields: Any) -> Any:
    return SimpleNamespace(
        req_pool_indices=ROWS,
        seq_lens=LENGTHS,
        out_cache_loc=SLOTS,
        forward_mode=SimpleNamespace(
            is_extend=lambda: extend, is_target_verify=lambda: "spec_info" in fields
        ),
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


def test_drafts_of_a_chain_have_no_mask_and_are_looked_for_before_an_extend() -> None:
    step = step_input(batch(extend=True, spec_info=SimpleNamespace(draft_token_num=5, topk=1)))
    assert step.kind == "verify" and step.drafts == Drafts(5)
    assert step.rows is ROWS and step.seq_lens is LENGTHS and step.out_loc is SLOTS


TREES = torch.tensor(
    [
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]
).bool()
BITS = [0b001, 0b011, 0b101, 0b001, 0b011, 0b111]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_masks_of_trees_with_and_without_the_tokens_in_front(whole: bool, padding: int) -> None:
    lengths = [7, 4] + [1] * padding
    masks = [torch.cat([torch.ones(3, n).bool(), x], 1) for n, x in zip([7, 4], TREES, strict=True)]
    mask = torch.cat([x.flatten() for x in masks]) if whole else TREES.flatten()
    tokens = torch.zeros(6) if padding else None  # none while a graph is captured
    drafts = SimpleNamespace(draft_token_num=3, custom_mask=mask, topk=4, draft_token=tokens)
    given = batch(extend=True, spec_info=drafts)
    given.seq_lens, given.req_pool_indices = torch.tensor(lengths), torch.zeros(len(lengths))
    given.out_cache_loc = torch.arange(6)
    step = step_input(given)
    assert step.drafts is not None and step.drafts.mask is not None
    assert step.drafts.mask.tolist() == BITS + [0b001, 0b010, 0b100] * padding


@pytest.mark.parametrize("whole", [False, True])
def test_slots_of_padded_requests_are_no_sign_of_real_ones(whole: bool) -> None:
    """In an eager step, DP attention pads requests and the slots of their drafts. With one request
    of 64 tokens, 8 drafts and 8 padded requests, a whole mask has as many entries as 9 masks
    without the tokens in front."""
    tree = torch.eye(8).bool()
    tree[:, 0] = True  # eight children of one parent
    mask = torch.cat([torch.ones(8, 64).bool(), tree], 1) if whole else tree
    assert not whole or mask.numel() == 9 * 8 * 8
    drafts = SimpleNamespace(
        draft_token_num=8, custom_mask=mask.flatten(), topk=4, draft_token=torch.zeros(8)
    )
    given = batch(extend=True, spec_info=drafts)
    given.seq_lens, given.req_pool_indices = torch.tensor([64] + [1] * 8), torch.zeros(9)
    given.out_cache_loc = torch.arange(9 * 8)
    step = step_input(given)
    assert step.drafts is not None and step.drafts.mask is not None
    own = [1 << node for node in range(8)]
    assert step.drafts.mask.tolist() == [1, *(1 | bit for bit in own[1:])] + own * 8


def test_a_worker_without_requests_verifies_padding() -> None:
    none = SimpleNamespace(
        draft_token_num=3, custom_mask=torch.ones(0).bool(), topk=4, draft_token=torch.zeros(0)
    )
    given = batch(extend=True, spec_info=none)
    given.seq_lens, given.req_pool_indices = torch.ones(2).long(), torch.zeros(2)
    given.out_cache_loc = torch.arange(6)
    step = step_input(given)
    assert step.drafts is not None and step.drafts.mask is not None
    assert step.drafts.mask.tolist() == [0b001, 0b010, 0b100] * 2


def test_the_last_of_32_drafts_is_the_sign() -> None:
    mask = ancestors(torch.ones(32 * 32).bool(), torch.tensor([0]), 32, 1)
    assert mask.dtype == torch.int32 and mask[-1] == -1 and mask[3] == 0b1111


def runner(
    scales: dict[int, float],
    *,
    pool_layers: tuple[int, ...] | None = None,
    caps: tuple[float, ...] = (),
) -> Any:
    """Of a worker with layers 6 to 9; `scales` and `caps` are those of its attention layers."""
    layers = [
        SimpleNamespace(layer_id=layer, scaling=scale, tp_q_head_num=6, logit_cap=cap)
        for (layer, scale), cap in zip_longest(scales.items(), caps, fillvalue=0.0)
    ]
    inner = SimpleNamespace(
        start_layer=6,
        layer_num=len(scales),
        device="cpu",
        windows=SimpleNamespace(shape=SimpleNamespace(max_batch=5)),
    )
    hybrid = SimpleNamespace(
        full_kv_pool=inner,
        full_attention_layer_id_mapping={
            layer: place for place, layer in enumerate(pool_layers or scales)
        },
    )
    return SimpleNamespace(
        model=layers,
        model_config=SimpleNamespace(context_len=100),
        layer_info=SimpleNamespace(start_layer=6, end_layer=10),
        token_to_kv_pool=inner if pool_layers is None else hybrid,
    )


@pytest.fixture
def full_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which layers of the model have full attention."""
    monkeypatch.setattr(geometry, "attention_layers", iter)
    return lambda *layers: monkeypatch.setattr(geometry, "full_layers", lambda _: layers)


def test_the_configuration_of_a_worker(full_layers: Callable[..., None]) -> None:
    full_layers(*range(20))
    config = geometry.cache_config(runner(dict.fromkeys(range(6, 10), 0.1)))
    assert (config.layer_ids, config.num_q_heads, config.softmax.scale) == ((6, 7, 8, 9), 6, 0.1)
    assert (config.max_batch, config.piece_tokens) == (5, 0) and config.max_tokens >= 100


def test_only_full_attention_layers_of_the_worker_count(full_layers: Callable[..., None]) -> None:
    """A hybrid model, of which this worker has a part. Layer 8 has another kind of attention."""
    full_layers(3, 7, 9, 11)
    config = geometry.cache_config(runner({7: 0.1, 8: 0.3, 9: 0.1}, pool_layers=(7, 9)))
    assert (config.layer_ids, config.softmax.scale, config.max_batch) == ((7, 9), 0.1, 5)


def test_a_pool_for_other_layers_is_noticed(full_layers: Callable[..., None]) -> None:
    full_layers(3, 7, 9, 11)
    for built in ((9, 7), (7, 8)):
        with pytest.raises(ServerFailed, match="built a pool for layers"):
            geometry.cache_config(runner({7: 0.1, 9: 0.1}, pool_layers=built))


def test_a_pipeline_stage_without_full_attention_is_refused(
    full_layers: Callable[..., None],
) -> None:
    full_layers(3, 11)
    with pytest.raises(UsageError, match=r"layers 6 \.\. 9 of this model have no full attention"):
        geometry.cache_config(runner({}))


def test_layers_must_share_their_scaling_and_their_cap(full_layers: Callable[..., None]) -> None:
    full_layers(6, 7)
    assert geometry.cache_config(runner({6: 0.1, 7: 0.1}, caps=(30.0, 30.0))).softmax.cap == 30.0
    for wrong in (runner({6: 0.1, 7: 0.2}), runner({6: 0.1, 7: 0.1}, caps=(30.0, 50.0))):
        with pytest.raises(UnsupportedModel, match="different scaling or caps"):
            geometry.cache_config(wrong)
