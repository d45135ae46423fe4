"""Steps that verify drafts: outputs and stores are those of decode steps over the accepted tokens,
for kernels and references, eager and through the views that a graph holds."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from small_caches import PARENTS, CacheShape, Worker, masks_of, path_to, random_token

from oscar_kernels.cache import Drafts
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES, Ops
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.int2_cache import cache_bytes

COUNT = 4
SHAPE = CacheShape(sink=6, slots=1200, layers=2, drafts=COUNT)


@pytest.mark.parametrize(
    ("shape", "ops", "steps"),
    [
        ("chain", REFERENCES, 6),
        ("tree", REFERENCES, 6),
        ("bush", REFERENCES, 6),
        ("chain", KERNELS, 1),
        ("tree", KERNELS, 1),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_accepted_drafts_are_what_decode_steps_would_make(shape: str, ops: Ops, steps: int) -> None:
    """Two requests, one of which begins inside its sinks; then both go on with decode steps."""
    draw, parents = torch.Generator().manual_seed(3), PARENTS[shape]
    spoken, plain = Worker(SHAPE, ops), Worker(replace(SHAPE, drafts=1), ops)
    for row, count in ((1, 3), (3, 21)):
        prompt = [random_token(SHAPE, draw) for _ in range(count)]
        spoken.prefill(row, prompt)
        plain.prefill(row, prompt)
    mask = None if shape == "chain" else masks_of(parents).repeat(2)
    for step in range(steps):
        drafts = {row: [random_token(SHAPE, draw) for _ in range(COUNT)] for row in (1, 3)}
        given = spoken.verify((1, 3), Drafts(COUNT, mask))
        spoken.cache.begin(given)
        outputs = spoken.run([*drafts[1], *drafts[3]]).unflatten(1, (2, COUNT))
        target, source = [], []
        for at, row in enumerate((1, 3)):
            path = path_to(parents, (step + 2 + at) % COUNT)
            for depth, node in enumerate(path):
                want = plain.decode({row: drafts[row][node]})[:, 0]
                torch.testing.assert_close(outputs[:, at, node], want, atol=1e-4, rtol=1e-3)
                target.append(given.out_loc[at * COUNT + depth])
                source.append(given.out_loc[at * COUNT + node])
            spoken.lengths[row] += len(path)
        if mask is not None:
            padding = [torch.tensor(0)] * 3  # as SGLang gives it
            spoken.cache.commit(torch.stack(target + padding), torch.stack(source + padding))
    for _ in range(2 * steps):
        tokens = {row: random_token(SHAPE, draw) for row in (1, 3)}
        got, want = (worker.decode(tokens) for worker in (spoken, plain))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_a_graphs_views_show_later_steps_with_other_lengths() -> None:
    """The buffers of a graph for three requests: two real ones, and one of padding in row 0."""
    draw = torch.Generator().manual_seed(4)
    graph, eager = Worker(SHAPE, KERNELS), Worker(SHAPE, REFERENCES)
    for row, count in ((1, 3), (3, 40)):
        prompt = [random_token(SHAPE, draw) for _ in range(count)]
        graph.prefill(row, prompt)
        eager.prefill(row, prompt)
    held = StepInput(
        "verify",
        torch.zeros(3, dtype=torch.int64),
        (),
        torch.ones(3, dtype=torch.int64),
        torch.zeros(3 * COUNT, dtype=torch.int64),
        drafts=Drafts(COUNT, torch.full((3 * COUNT,), -1, dtype=torch.int32)),
    )
    graph.cache.begin(held)  # the capture: nobody's rows, and a mask of ones
    for shape in ("tree", "bush"):
        parents, tokens = PARENTS[shape], [random_token(SHAPE, draw) for _ in range(2 * COUNT)]
        drafts = Drafts(COUNT, masks_of(parents).repeat(2))
        given, plain = (worker.verify((1, 3), drafts) for worker in (graph, eager))
        held.rows[:2], held.seq_lens[:2] = given.rows, given.seq_lens
        held.out_loc[: 2 * COUNT] = given.out_loc
        padded = Drafts(COUNT, masks_of(parents).repeat(3))
        graph.cache.refill(replace(held, out_loc=given.out_loc, drafts=padded))
        got = graph.run([*tokens, *tokens[:COUNT]])
        eager.cache.begin(plain)
        torch.testing.assert_close(got[:, : 2 * COUNT], eager.run(tokens), atol=1e-4, rtol=1e-3)
        for worker, step in ((graph, given), (eager, plain)):
            worker.cache.commit(step.out_loc[[0, 1, 4]], step.out_loc[[0, 2, 4]])
            worker.lengths = {1: worker.lengths[1] + 2, 3: worker.lengths[3] + 1}


def test_the_plan_counts_the_tables_of_drafts() -> None:
    counted = cache_bytes(
        SHAPE.slot_shape,
        SHAPE.window_shape,
        REFERENCES,
        num_q_heads=SHAPE.num_q_heads,
        max_tokens=SHAPE.longest,
        piece_tokens=0,
        device="cpu",
    )
    assert Worker(SHAPE, REFERENCES).cache.report() == {"scratch": counted}


def test_a_cache_without_room_for_drafts_says_so() -> None:
    plain, two = (Worker(replace(SHAPE, drafts=n), REFERENCES) for n in (1, 2))
    for worker in (plain, two):
        worker.prefill(1, [random_token(SHAPE, torch.Generator().manual_seed(0))])
    with pytest.raises(RuntimeError, match="no room for them"):
        plain.cache.begin(plain.verify((1,), Drafts(2)))
    with pytest.raises(ValueError, match="3 drafts of a request; the ring has room for 2"):
        two.cache.begin(two.verify((1,), Drafts(3)))
    slots = torch.tensor([1])
    with pytest.raises(RuntimeError, match="no room for them"):
        plain.cache.commit(slots, slots)
    with pytest.raises(RuntimeError, match="no tree of drafts was verified"):
        two.cache.commit(slots, slots)
