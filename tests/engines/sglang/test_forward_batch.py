"""From SGLang's batch and model runner, plain objects here, to what the INT2 cache takes."""

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
    mode = {"is_extend": lambda: extend, "is_target_verify": lambda: "spec_info" in fields}
    given = {"req_pool_indices": ROWS, "seq_lens": LENGTHS, "out_cache_loc": SLOTS, **fields}
    return SimpleNamespace(forward_mode=SimpleNamespace(**mode), **given)


def test_an_extend_knows_its_rows_and_lengths_on_the_host() -> None:
    numbers = {"extend_prefix_lens_cpu": [20, 7], "extend_seq_lens_cpu": torch.tensor([4, 3])}
    step = step_input(batch(extend=True, **numbers))
    assert step.kind == "extend" and step.request_rows == (1, 3)
    assert step.prefix_lens == (20, 7) and step.extend_lens == (4, 3)
    assert step.out_loc.tolist() == list(range(7))  # what lies behind is padding


def test_other_steps_hold_the_engines_own_buffers() -> None:
    """Drafts are looked for before an extend; those of a chain have no mask."""
    step = step_input(batch(extend=False))
    assert step.kind == "decode" and step.prefix_lens == step.extend_lens == ()
    assert step.rows is ROWS and step.seq_lens is LENGTHS
    assert step.out_loc.data_ptr() == SLOTS.data_ptr() and len(step.out_loc) == 2
    step = step_input(batch(extend=True, spec_info=SimpleNamespace(draft_token_num=5, topk=1)))
    assert step.kind == "verify" and step.drafts == Drafts(5)
    assert step.rows is ROWS and step.seq_lens is LENGTHS and step.out_loc is SLOTS


def mask_of(count: int, lengths: list[int], mask: torch.Tensor, *, slots: int, real: int) -> Any:
    """The mask of a step with drafts. `slots`: of drafts, padding included; `real`: drafts, or -1
    where there are none, as while a graph is captured."""
    drafts = None if real < 0 else torch.zeros(real)
    given = {"draft_token_num": count, "custom_mask": mask, "topk": 4, "draft_token": drafts}
    step = step_input(
        batch(
            extend=True,
            spec_info=SimpleNamespace(**given),
            seq_lens=torch.tensor(lengths),
            req_pool_indices=torch.zeros(len(lengths)),
            out_cache_loc=torch.arange(slots),
        )
    )
    assert step.drafts is not None and step.drafts.mask is not None
    return step.drafts.mask.tolist()


TREES = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
BITS = [0b001, 0b011, 0b101, 0b001, 0b011, 0b111]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_masks_of_trees_with_and_without_the_tokens_in_front(whole: bool, padding: int) -> None:
    masks = [torch.cat([torch.ones(3, n).bool(), x], 1) for n, x in zip([7, 4], TREES, strict=True)]
    mask = torch.cat([x.flatten() for x in masks]) if whole else TREES.flatten()
    found = mask_of(3, [7, 4] + [1] * padding, mask, slots=6, real=6 if padding else -1)
    assert found == BITS + [0b001, 0b010, 0b100] * padding


@pytest.mark.parametrize("whole", [False, True])
def test_slots_of_padded_requests_are_no_sign_of_real_ones(whole: bool) -> None:
    """In an eager step, DP attention pads requests and the slots of their drafts. With one request
    of 64 tokens, 8 drafts and 8 padded requests, a whole mask has as many entries as 9 masks
    without the tokens in front."""
    tree = torch.eye(8).bool()
    tree[:, 0] = True  # eight children of one parent
    mask = torch.cat([torch.ones(8, 64).bool(), tree], 1) if whole else tree
    assert not whole or mask.numel() == 9 * 8 * 8
    own = [1 << node for node in range(8)]
    found = mask_of(8, [64] + [1] * 8, mask.flatten(), slots=9 * 8, real=8)
    assert found == [1, *(1 | bit for bit in own[1:])] + own * 8
    # A worker without requests verifies padding.
    assert mask_of(8, [1, 1], torch.ones(0).bool(), slots=16, real=0) == own * 2


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
    # A hybrid model, of which this worker has a part. Layer 8 has another kind of attention.
    full_layers(3, 7, 9, 11)
    config = geometry.cache_config(runner({7: 0.1, 8: 0.3, 9: 0.1}, pool_layers=(7, 9)))
    assert (config.layer_ids, config.softmax.scale, config.max_batch) == ((7, 9), 0.1, 5)
    full_layers(6, 7)
    assert geometry.cache_config(runner({6: 0.1, 7: 0.1}, caps=(30.0, 30.0))).softmax.cap == 30.0


@pytest.mark.parametrize(
    ("full", "built", "error"),
    [
        ((3, 7, 9, 11), runner({7: 0.1, 9: 0.1}, pool_layers=(9, 7)), ServerFailed),
        ((3, 7, 9, 11), runner({7: 0.1, 9: 0.1}, pool_layers=(7, 8)), ServerFailed),
        ((3, 11), runner({}), UsageError),  # a pipeline stage without full attention
        ((6, 7), runner({6: 0.1, 7: 0.2}), UnsupportedModel),
        ((6, 7), runner({6: 0.1, 7: 0.1}, caps=(30.0, 50.0)), UnsupportedModel),
    ],
)
def test_a_worker_that_cannot_be_served_is_refused(
    full_layers: Callable[..., None], full: tuple[int, ...], built: Any, error: type[Exception]
) -> None:
    full_layers(*full)
    with pytest.raises(error):
        geometry.cache_config(built)
