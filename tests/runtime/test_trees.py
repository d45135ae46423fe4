"""A chain in place of a tree of drafts."""

from collections.abc import Sequence

import numpy as np
import pytest

from oscar_zoo.runtime.batch import longest_chains


def seen_by(parents: Sequence[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@pytest.mark.parametrize(
    ("parents", "order"),
    [
        ((-1, 0, 1, 2), (0, 1, 2, 3)),
        ((-1, 0, 0, 0), (0, 1, 2, 3)),
        ((-1, 0, 0, 1, 2, 4), (0, 2, 4, 5, 1, 3)),
        ((-1, 0, 0, 1, 2), (0, 1, 3, 2, 4)),
        ((-1,), (0,)),
    ],
    ids=["a chain", "fillers", "two chains", "two of one length", "one draft"],
)
@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_long_paths_come_first(parents: Sequence[int], order: Sequence[int], dtype: type) -> None:
    tokens, mask = np.arange(len(parents)) + 10, seen_by(parents).astype(dtype)
    got, seen = longest_chains(tokens, mask.reshape(-1))
    assert got.tolist() == [10 + node for node in order] and got.dtype == tokens.dtype
    assert seen.dtype == dtype
    assert seen.reshape(mask.shape).tolist() == np.tri(len(parents), dtype=dtype).tolist()


def test_requests_have_chains_of_their_own() -> None:
    trees = [seen_by(parents) for parents in ((-1, 0, 0, 2), (-1, 0, 1, 0))]
    tokens, mask = longest_chains(np.arange(8), np.concatenate([x.reshape(-1) for x in trees]))
    assert tokens.tolist() == [0, 2, 3, 1, 4, 5, 6, 7]
    assert mask.tolist() == np.tile(np.tri(4, dtype=bool).reshape(-1), 2).tolist()
