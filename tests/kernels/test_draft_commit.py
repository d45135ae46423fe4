"""Committing drafts of a tree: what is copied, what is left alone, and the kernel against its
reference."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from random_caches import Filling, random_cache

from oscar_kernels import reference
from oscar_kernels import slots as launcher
from oscar_kernels.spec import QuantSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORES = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")
COUNT = 5
LENGTHS = [35, 9, 6, 20]
"""With the drafts; 4 sinks, so that the third request fills some of them."""
ACCEPTED = [[0, 2, 3, -1, -1], [0, 1, 2, 3, 4], [0, 1, 4, -1, -1], [-1] * COUNT]


def random_filling(seed: int) -> Filling:
    return random_cache(
        LENGTHS, QuantSpec(32, 16), QuantSpec(24, 12, bits=4), drafts=COUNT, sink=4, recent=8,
        seed=seed, device=DEVICE, sink_from=0, ring_start=0,
    )  # fmt: skip


def committed(module: object, fillings: list[Filling]) -> list[Filling]:
    done = copy.deepcopy(fillings)
    batch = done[0].batch
    module.DraftCommit([one.cache for one in done])(  # type: ignore[attr-defined]
        accepted=torch.tensor(ACCEPTED, dtype=torch.int32, device=DEVICE).flatten(),
        count=COUNT,
        rows=batch.rows,
        lengths=torch.tensor(LENGTHS, device=DEVICE) - COUNT,
        out_loc=slots(done[0]).flatten(),
        windows=batch.windows,
    )
    return done


def slots(filling: Filling) -> torch.Tensor:
    """Of the drafts, `[B, n]`."""
    ends = filling.batch.kv_indptr[1:].tolist()
    return torch.stack([filling.batch.kv_indices[end - COUNT : end] for end in ends]).long()


def test_the_kernel_copies_what_its_reference_copies() -> None:
    fillings = [random_filling(seed) for seed in (0, 0)]
    got, want = (committed(module, fillings) for module in (launcher, reference))
    for one, other in zip(got, want, strict=True):
        for name in STORES:
            a, b = getattr(one.cache, name), getattr(other.cache, name)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_accepted_nodes_become_the_next_tokens() -> None:
    before = random_filling(1)
    (after,) = committed(reference, [before])
    rows, blocks = before.batch.rows.tolist(), before.batch.windows.sink_block.tolist()
    changed = {name: torch.zeros_like(getattr(before.cache, name)[..., 0, 0]).bool()
               for name in STORES}  # fmt: skip
    for request, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        start, own = length - COUNT, slots(before)[request].tolist()
        for depth, node in enumerate(ACCEPTED[request]):
            if node < 0:
                continue
            for name in ("codes", "affine"):
                old, new = getattr(before.cache, name), getattr(after.cache, name)
                assert torch.equal(new[own[depth]], old[own[node]])
                changed[name][own[depth]] = True
            for side in "kv":
                old, new = (getattr(x.cache, f"ring_{side}") for x in (before, after))
                want = old[row, (start + node) % old.shape[1]]
                assert torch.equal(new[row, (start + depth) % old.shape[1]], want)
                changed[f"ring_{side}"][row, (start + depth) % old.shape[1]] = True
                if start + depth < 4:
                    sinks = getattr(after.cache, f"sink_{side}")
                    assert torch.equal(sinks[blocks[row], start + depth], want)
                    changed[f"sink_{side}"][blocks[row], start + depth] = True
    for name in STORES:
        old, new = (getattr(x.cache, name)[~changed[name]] for x in (before, after))
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), name
    assert changed["sink_k"].sum() == 3


def test_accepted_nodes_are_found_by_their_slots() -> None:
    out_loc = torch.tensor([7, 3, 9, 4, 8, 5], device=DEVICE)  # two requests with three drafts
    pairs = [(7, 7), (3, 9), (4, 4), (8, 5), (0, 0), (0, 9), (9, 4), (6, 3), (5, 99)]
    target, source = torch.tensor(pairs, device=DEVICE).T
    accepted = launcher.accepted_nodes(out_loc, 3, target, source)
    assert accepted.tolist() == [0, 2, -1, 0, 2, -1]
