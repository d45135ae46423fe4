"""Packing slots: the kernel and its reference copy every request's slots in order, and nothing
else is touched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from oscar_kernels import reference, slots
from oscar_kernels.slots import BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 3], [BLOCK, 2 * BLOCK + 1, 1, 7]])
def test_rows_are_packed_in_order(lengths: list[int], dtype: torch.dtype) -> None:
    table = torch.randint(0, 1 << 30, (6, max(lengths) + 3), dtype=dtype)
    rows = torch.tensor([5, 0, 3, 1][: len(lengths)])
    kv_indptr = torch.tensor([0, *lengths]).cumsum(0)
    expected = torch.cat(
        [table[row, :n].int() for row, n in zip(rows.tolist(), lengths, strict=True)]
    )
    for module in (slots, reference):
        out = torch.full((sum(lengths) + 4,), -1, dtype=torch.int32, device=DEVICE)
        module.pack_slots(table.to(DEVICE), rows.to(DEVICE), kv_indptr.to(DEVICE), out)
        assert out.tolist() == [*expected.tolist(), -1, -1, -1, -1], module.__name__


def test_shapes_that_do_not_fit_are_refused() -> None:
    tensors = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (4, 2, 2, 4)]
    for module in (slots, reference):
        with pytest.raises(ValueError, match="kv_indptr"):
            module.pack_slots(*tensors)
