"""Packing slots and committing drafts of a tree: what is copied, what is left alone, and kernels
against their references."""

import copy
from typing import Any

import pytest
import torch
from random_caches import Filling, random_cache

pytest.importorskip("triton")

from oscar_kernels import reference
from oscar_kernels import slots as launcher
from oscar_kernels.cache import NewTokens
from oscar_kernels.slots import BLOCK
from oscar_kernels.spec import QuantSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 5
LENGTHS = [35, 9, 6, 20]
"""With the drafts; 4 sinks, so that the third request fills some of them."""
ACCEPTED = [[0, 2, 3, -1, -1], [0, 1, 2, 3, 4], [0, 1, 4, -1, -1], [-1] * COUNT]


@pytest.mark.parametrize("page", [1, 16, 48])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[], [1], [5, 0, 3], [BLOCK, 2 * BLOCK + 1, 1, 7]])
def test_rows_are_packed_in_order(lengths: list[int], dtype: torch.dtype, page: int) -> None:
    table = torch.randint(0, 1 << 20, (6, max(lengths, default=0) + 3), dtype=dtype, device=DEVICE)
    rows = torch.tensor([5, 0, 3, 1], device=DEVICE)[: len(lengths)]
    pairs = zip(rows.tolist(), map(torch.arange, lengths), strict=True)
    want = [x for row, at in pairs for x in table[row].cpu()[at // page] * page + at % page]
    for module in (launcher, reference):
        out = torch.full((sum(lengths) + 4,), -1, dtype=torch.int32, device=DEVICE)
        ends = torch.full((len(lengths) + 1,), -1, dtype=torch.int32, device=DEVICE)
        sizes = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
        module.pack_slots(table, rows, sizes, ends, out, page)
        assert out.tolist() == [*map(int, want), -1, -1, -1, -1], module.__name__
        assert ends.tolist() == [0, *sizes.cumsum(0).tolist()], module.__name__


def test_new_tokens_of_a_decode_step() -> None:
    """The third request is padding."""
    table = torch.arange(40, dtype=torch.int32, device=DEVICE).view(4, 10)
    rows, lengths = (torch.tensor(x, device=DEVICE) for x in ([0, 1, 2], [70, 1, 0]))
    for module in (launcher, reference):
        out = torch.zeros(80, dtype=torch.int32, device=DEVICE)
        kv_indptr = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        own = [torch.full((3,), 7, device=DEVICE) for _ in range(3)]
        step = NewTokens(torch.tensor([75, 90, -1], device=DEVICE), *own)
        module.pack_slots(table, rows, lengths.int(), kv_indptr, out, 9, step)
        assert kv_indptr.tolist() == [0, 70, 71, 72], module.__name__
        assert [one.tolist() for one in own] == [[75, 90, 0], [70, 1, 1], [69, 0, 0]]
        assert out[69:73].tolist() == [69, 90, 180, 0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    tensors = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (4, 2, 2, 2, 4)]
    for module in (launcher, reference):
        with pytest.raises(ValueError, match="kv_indptr"):
            module.pack_slots(*tensors)


def random_filling(seed: int) -> Filling:
    return random_cache(
        LENGTHS, QuantSpec(32, 16), QuantSpec(24, 12, bits=4), drafts=COUNT, sink=4, recent=8,
        seed=seed, device=DEVICE, sink_from=0, ring_start=0,
    )  # fmt: skip


def slots(filling: Filling) -> torch.Tensor:
    """Of the drafts, `[B, n]`."""
    ends = filling.batch.kv_indptr[1:].tolist()
    return torch.stack([filling.batch.kv_indices[end - COUNT : end] for end in ends]).long()


def committed(module: Any, fillings: list[Filling]) -> list[Filling]:
    done = copy.deepcopy(fillings)
    batch = done[0].batch
    module.DraftCommit([one.cache for one in done])(
        accepted=torch.tensor(ACCEPTED, dtype=torch.int32, device=DEVICE).flatten(),
        count=COUNT,
        rows=batch.rows,
        lengths=torch.tensor(LENGTHS, device=DEVICE) - COUNT,
        out_loc=slots(done[0]).flatten(),
        windows=batch.windows,
    )
    return done


def test_the_kernel_copies_what_its_reference_copies() -> None:
    fillings = [random_filling(seed) for seed in (0, 0)]
    got, want = (committed(module, fillings) for module in (launcher, reference))
    for one, other in zip(got, want, strict=True):
        for a, b in zip(one.cache.stores, other.cache.stores, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_accepted_nodes_become_the_next_tokens() -> None:
    before = random_filling(1)
    (after,) = committed(reference, [before])
    rows, blocks = before.batch.rows.tolist(), before.batch.windows.sink_block.tolist()
    changed = [torch.zeros_like(store[..., 0, 0]).bool() for store in before.cache.stores]
    pairs = list(zip(before.cache.stores, after.cache.stores, changed, strict=True))
    for request, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        start, own = length - COUNT, slots(before)[request].tolist()
        for depth, node in enumerate(ACCEPTED[request]):
            if node < 0:
                continue
            for old, new, touched in pairs[:2]:
                assert torch.equal(new[own[depth]], old[own[node]])
                touched[own[depth]] = True
            for (old, new, touched), (_, sinks, filled) in zip(pairs[2:4], pairs[4:], strict=True):
                want = old[row, (start + node) % old.shape[1]]
                assert torch.equal(new[row, (start + depth) % old.shape[1]], want)
                touched[row, (start + depth) % old.shape[1]] = True
                if start + depth < 4:
                    assert torch.equal(sinks[blocks[row], start + depth], want)
                    filled[blocks[row], start + depth] = True
    for old, new, touched in pairs:
        a, b = old[~touched], new[~touched]
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert changed[4].sum() == 3


def test_accepted_nodes_are_found_by_their_slots() -> None:
    out_loc = torch.tensor([7, 3, 9, 4, 8, 5], device=DEVICE)  # two requests with three drafts
    pairs = [(7, 7), (3, 9), (4, 4), (8, 5), (0, 0), (0, 9), (9, 4), (6, 3), (5, 99)]
    target, source = torch.tensor(pairs, device=DEVICE).T
    accepted = launcher.accepted_nodes(out_loc, 3, target, source)
    assert accepted.tolist() == [0, 2, -1, 0, 2, -1]
