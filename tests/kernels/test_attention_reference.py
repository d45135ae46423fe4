"""The reference attention against a loop over tokens and heads, written a second time from the
rules of `cache`."""

import math
from dataclasses import replace

import pytest
import torch
from random_caches import assert_as_good_as_torch, poisoned_allocations, random_cache

from oscar_kernels import quantizer, reference
from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec

SPEC = QuantSpec(16, 8, 0.96)


def tier(position: int, length: int, window: tuple[int, int], sizes: tuple[int, int]) -> str:
    """Where a position is read, by the sentences of `oscar_kernels.cache`."""
    (sink_from, ring_start), (sink, recent) = window, sizes
    if sink_from <= position < min(sink, length):
        return "sink"
    return "ring" if max(length - recent, ring_start) <= position < length else "codes"


@pytest.mark.parametrize("sink_from", [0, 2, 4])
@pytest.mark.parametrize("ring_start", [0, 5, 9])
@pytest.mark.parametrize("sizes", [(4, 6), (0, 6), (4, 0), (0, 0)], ids=str)
def test_every_position_is_read_where_the_rules_say(
    sink_from: int, ring_start: int, sizes: tuple[int, int]
) -> None:
    lengths = [1, 3, 4, 6, 7, 10, 12]
    filling = random_cache(
        lengths, SPEC, sink=sizes[0], recent=sizes[1], sink_from=sink_from, ring_start=ring_start
    )
    stored_k, stored_v = (quantizer.fake_quantize(x, SPEC) for x in (filling.keys, filling.values))
    first = 0
    for request, length in enumerate(lengths):
        keys, values = reference.cached_rows(filling.cache, filling.batch, request, torch.float64)
        for p in range(length):
            exact = tier(p, length, (sink_from, ring_start), sizes) != "codes"
            want_k, want_v = (filling.keys, filling.values) if exact else (stored_k, stored_v)
            assert torch.equal(keys[p].float(), want_k[first + p])
            assert torch.equal(values[p].float(), want_v[first + p])
        first += length


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_decode_is_the_softmax_of_every_head_on_its_own(cap: float) -> None:
    lengths = [5, 1, 9]
    filling = random_cache(lengths, SPEC, QuantSpec(8, 8), sink=2, recent=3)
    query = torch.randn(3, 6, 16, dtype=torch.float64)
    partner = torch.randn(2, 8, 8)
    got = reference.decode_attention(
        query, filling.cache, filling.batch, sm_scale=0.3, logit_cap=cap, o_partner=partner
    )
    for request in range(3):
        keys, values = reference.cached_rows(filling.cache, filling.batch, request, torch.float64)
        for head in range(6):
            logits = [float(query[request, head] @ k) * 0.3 for k in keys[:, head // 3]]
            if cap:
                logits = [cap * math.tanh(x / cap) for x in logits]
            weights = [math.exp(x) for x in logits]
            weighted = sum(w * v for w, v in zip(weights, values[:, head // 3], strict=True))
            output = weighted / sum(weights)
            torch.testing.assert_close(got[request, head], output @ partner[head // 3].double().T)


TREE = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
"""The nodes that each of five drafts sees."""


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("sizes", [(4, 6), (0, 5), (9, 5)], ids=str)
def test_a_draft_is_the_last_of_a_step_over_ancestors(chain: bool, sizes: tuple[int, int]) -> None:
    lengths, count = [5, 8, 0, 12, 40], len(TREE)
    filling = random_cache(
        lengths, SPEC, sink=sizes[0], recent=sizes[1], drafts=count, sink_from=0, ring_start=0
    )
    seen = [list(range(node + 1)) for node in range(count)] if chain else TREE
    masks = torch.tensor([sum(1 << i for i in nodes) for nodes in seen], dtype=torch.int32)
    query = torch.randn(len(lengths) * count, 4, 16, dtype=torch.float64)
    drafts = Drafts(count, None if chain else masks.repeat(len(lengths)))
    options = {"sm_scale": 0.3, "logit_cap": 1.5}
    got = reference.decode_attention(
        query, filling.cache, filling.batch, drafts=drafts, **options
    ).unflatten(0, (len(lengths), count))
    for request, length in enumerate(lengths):
        first, sure = int(filling.batch.kv_indptr[request]), length - count
        row = int(filling.batch.rows[request])
        block = int(filling.batch.windows.sink_block[row])
        for node, nodes in enumerate(seen if length else []):
            path = sure + torch.tensor(nodes)
            names = ("ring_k", "ring_v", "sink_k", "sink_v")
            copies = {name: getattr(filling.cache, name).clone() for name in names}
            cache = replace(filling.cache, **copies)
            for x, rows in (("k", filling.keys), ("v", filling.values)):
                ring, sinks = getattr(cache, f"ring_{x}"), getattr(cache, f"sink_{x}")
                for at, source in enumerate((first + path).tolist(), sure):
                    ring[row, at % cache.ring_rows] = rows[source]
                    sinks[block, at : min(at + 1, cache.sink)] = rows[source]
            end = first + sure + len(nodes)
            one = filling.batch.rows[request : request + 1]
            alone = replace(filling.batch, kv_indptr=torch.tensor([first, end]), rows=one)
            want = reference.decode_attention(
                query[None, request * count + node], cache, alone, **options
            )
            torch.testing.assert_close(got[request, node], want[0])
    assert not got[2].any()


def test_extend_is_decode_over_a_growing_exact_tail() -> None:
    filling = random_cache([0, 7, 11], SPEC, sink=2, recent=4)
    qo_indptr = torch.tensor([0, 3, 3, 8])
    query, key, value = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    got, lse = reference.extend_attention(
        query.double(), key, value, filling.cache, filling.batch, qo_indptr=qo_indptr, sm_scale=0.2
    )
    assert not got[8].any() and (lse[8] == -math.inf).all()
    for token in range(8):
        request = 0 if token < 3 else 2
        keys, values = reference.cached_rows(filling.cache, filling.batch, request, torch.float64)
        new = slice(int(qo_indptr[request]), token + 1)
        keys = torch.cat([keys, key[new].double()])
        values = torch.cat([values, value[new].double()])
        logits = torch.einsum("hgd,nhd->hgn", query[token].double().view(2, 2, 16), keys) * 0.2
        want = torch.einsum("hgn,nhd->hgd", torch.softmax(logits, -1), values).view(4, 16)
        torch.testing.assert_close(got[token], want)
        torch.testing.assert_close(lse[token], torch.logsumexp(logits, -1).view(4))


def test_an_empty_request_gets_zeros() -> None:
    made = random_cache([0, 2], SPEC, sink=2, recent=4)
    got = reference.decode_attention(torch.randn(2, 4, 16), made.cache, made.batch, sm_scale=1.0)
    assert not got[0].any() and got[1].isfinite().all()


def test_the_tolerance_rule_sees_an_error_and_nan() -> None:
    x = torch.randn(8, 8)
    assert_as_good_as_torch(x @ x, torch.matmul, [x, x])
    for wrong in (x @ x + 1e-3, (x @ x) * math.nan, (x @ x)[:4]):
        with pytest.raises(AssertionError):
            assert_as_good_as_torch(wrong, torch.matmul, [x, x])


def test_allocations_inside_the_block_are_poison() -> None:
    with poisoned_allocations():
        made = [torch.empty(3), torch.zeros(3).new_empty(2), torch.empty(2, dtype=torch.uint8)]
    assert made[0].isnan().all() and made[1].isnan().all() and (made[2] == 255).all()
    assert not torch.zeros(3).isnan().any()
