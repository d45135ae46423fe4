"""Drafts on a GPU with heads as real models have them, in a CUDA graph: kernels against the
references, with lengths that are not those of the capture."""

from dataclasses import replace

import pytest
import torch
from cache_oracle import PlainPrefill
from small_caches import CacheShape, Worker, masks_of, random_token

from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES
from oscar_zoo.runtime.engine import StepInput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PARENTS = (-1, 0, 0, 2, 1, 3, 0, 6)
COUNT = len(PARENTS)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("heads", "group", "dim"), [(8, 4, 128), (4, 16, 128), (2, 8, 256)])
def test_a_graph_verifies_and_commits_drafts(heads: int, group: int, dim: int, tree: bool) -> None:
    spec = QuantSpec(dim, dim, 0.9, "float16")
    shape = CacheShape(
        heads,
        group,
        (spec, spec),
        sink=64,
        recent=256,
        slots=1200,
        longest=600,
        layers=2,
        drafts=COUNT,
        dtype=torch.bfloat16,
        device="cuda",
    )
    draw = torch.Generator().manual_seed(5)
    fast = Worker(replace(shape, piece=64), KERNELS, PlainPrefill())
    plain = Worker(shape, REFERENCES)
    for row, count in ((1, 400), (3, 20)):
        prompt = [random_token(shape, draw) for _ in range(count)]
        fast.prefill(row, prompt)
        plain.prefill(row, prompt)
    ones = torch.full((3 * COUNT,), -1, dtype=torch.int32, device="cuda")
    held = StepInput(  # three requests, the last of which is padding
        "verify",
        fast.integers([0, 0, 0]),
        (),
        fast.integers([1, 1, 1]),
        fast.integers([0] * 3 * COUNT),
        drafts=Drafts(COUNT, ones if tree else None),
    )
    fast.cache.begin(held)
    inputs = [random_token(shape, draw) for _ in range(3 * COUNT)]
    rows = [torch.stack([getattr(one, name) for one in inputs], 1) for name in "qkv"]

    def step() -> torch.Tensor:
        return torch.stack([fast.cache.forward(i, *(x[i] for x in rows)) for i in range(2)])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(4):
        tokens = [random_token(shape, draw) for _ in range(2 * COUNT)]
        for x, name in zip(rows, "qkv", strict=True):
            x[:, : 2 * COUNT] = torch.stack([getattr(one, name) for one in tokens], 1)
        mask = masks_of(PARENTS).repeat(3).cuda() if tree else None
        two = None if mask is None else mask[: 2 * COUNT]
        given = [worker.verify((1, 3), Drafts(COUNT, two)) for worker in (fast, plain)]
        held.rows[:2], held.seq_lens[:2] = given[0].rows, given[0].seq_lens
        held.out_loc[: 2 * COUNT] = given[0].out_loc
        drafts = Drafts(COUNT, mask)
        fast.cache.refill(
            StepInput("verify", held.rows, (), held.seq_lens, given[0].out_loc, drafts=drafts)
        )
        graph.replay()
        plain.cache.begin(given[1])
        want = plain.run(tokens).float()
        got = out[:, : 2 * COUNT].float()
        assert float((got - want).norm() / want.norm()) < 0.03  # codes at a tie differ
        # Of the first request nodes 0, 2 and 3 are accepted, of the second one its first node; in
        # a chain, three drafts and one.
        path = [0, 2, 3] if tree else [0, 1, 2]
        for worker, one in zip((fast, plain), given, strict=True):
            if tree:
                worker.cache.commit(one.out_loc[[0, 1, 2, COUNT]], one.out_loc[[*path, COUNT]])
            worker.lengths = {1: worker.lengths[1] + 3, 3: worker.lengths[3] + 1}
