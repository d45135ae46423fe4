"""A list of slots from a table of pages, which is what vLLM has in place of one of slots."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from oscar_kernels import reference, slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("page", [1, 16, 48])
def test_slots_of_pages(page: int) -> None:
    lengths, rows = [1, 0, 1100, 48], torch.tensor([3, 0, 4, 1], device=DEVICE)
    table = torch.randint(0, 1 << 20, (5, 1100), dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    pairs = [(row, p) for row, n in zip(rows.tolist(), lengths, strict=True) for p in range(n)]
    want = [int(table[row, p // page]) * page + p % page for row, p in pairs]
    for module in (slots, reference):
        out = torch.full((len(want) + 1,), -1, dtype=torch.int32, device=DEVICE)
        module.pack_slots(table, rows, ends, out, page)
        assert out.tolist() == [*want, -1], module.__name__
