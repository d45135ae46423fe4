"""Which ring of a request that has ended a prompt may take over, and when it is gone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_zoo.runtime.kept_rings import LATE, KeptRings
from oscar_zoo.runtime.stores import WindowShape, WindowStore

RECENT = 16
SCOPE = (None,)
FIRST = list(range(100, 140))
ANSWER = list(range(500, 510))
NEXT = [7, 8, 9, 10]


def talked(rings: KeptRings, row: int = 1, *, prefix: int = 0) -> list[int]:
    """A request ran in `row` and has ended; all its tokens."""
    rings.hand_out([row])
    rings.begin({row: prefix})
    rings.launched([row], [len(FIRST)])
    rings.ended(row, SCOPE, FIRST, ANSWER)
    return [*FIRST, *ANSWER]


def test_a_next_turn_takes_the_ring_of_the_last() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    choice = rings.choose(SCOPE, turn)
    assert choice is not None
    end = len(FIRST) + len(ANSWER) - 1  # the last token of an answer was only sampled
    assert (choice.row, choice.first, choice.end) == (1, end - RECENT + LATE, end)
    rings.hand_out([2])
    rings.expect(2, choice, 53)
    assert rings.begin({2: end}) == {2: choice} and (rings.used, rings.lost) == (1, 0)


ALL = [*FIRST, *ANSWER]
END = len(ALL) - 1
"""The last token of an answer was only sampled."""


@pytest.mark.parametrize(
    ("recent", "drafts", "turn", "bounds"),
    [
        # A window begins in front of what late steps leave of the ring.
        (RECENT, 3, [*ALL, *NEXT], None),
        (RECENT, 3, [*ALL, *NEXT, *range(6)], (END - (RECENT + 2) + 3 * LATE, END)),
        # A long turn fills its window by itself.
        (RECENT, 1, [*ALL, *range(RECENT - 1)], None),
        (RECENT, 1, [*ALL, *range(RECENT - 2)], (END - RECENT + LATE, END)),
        # A ring is good up to the last common token.
        (RECENT, 1, [*ALL[:46], *range(8)], (END - RECENT + LATE, 46)),
        (RECENT, 1, [*ALL[:30], *range(20)], None),
        (RECENT, 1, [1, *ALL[1:], 7], None),
        # The last token of a prompt is prefilled.
        (RECENT, 1, ALL[:-1], None),
        (64, 1, ALL[:45], (0, 44)),
        # No ring is kept where hits do not refill.
        (0, 1, [*ALL, *NEXT], None),
    ],
)
def test_what_of_a_ring_a_prompt_may_use(
    recent: int, drafts: int, turn: list[int], bounds: tuple[int, int] | None
) -> None:
    rings = KeptRings(recent, drafts)
    talked(rings)
    choice = rings.choose(SCOPE, turn)
    assert (choice and (choice.first, choice.end)) == bounds


def test_other_scopes_and_opaque_tokens_share_nothing() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    assert rings.choose(("adapter",), turn) is None and rings.choose(None, turn) is None
    rings.begin({3: 0})
    rings.ended(3, None, FIRST, ANSWER)
    assert rings.choose(None, turn) is None
    rings.flush()
    assert rings.choose(SCOPE, turn) is None


def test_a_ring_is_there_until_its_row_has_another_owner() -> None:
    """In the step in which it changes owner it is; nobody chooses it once it was handed out."""
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    choice = rings.choose(SCOPE, turn)
    rings.hand_out([1, 2])
    assert rings.choose(SCOPE, turn) is None
    rings.expect(2, choice, 53)
    assert list(rings.begin({1: 0, 2: 48})) == [2]
    rings.hand_out([2])
    rings.expect(2, choice, 53)
    assert rings.begin({2: 48}) == {} and rings.lost == 1


def test_what_a_request_never_had_in_its_ring_is_not_promised() -> None:
    """It began behind a prefix hit, or ended in the middle of its prompt."""
    rings = KeptRings(64)
    turn = [*talked(rings, prefix=45), *NEXT]
    assert rings.choose(SCOPE, turn) is None, "its window begins in front of the ring"
    rings.begin({5: 0})
    rings.launched([5], [20])
    rings.ended(5, SCOPE, FIRST, [])
    choice = rings.choose(SCOPE, [*FIRST, 7])
    assert choice is not None and choice.end == 20


def test_a_retracted_request_that_ends_in_its_second_prefill_promises_what_it_has() -> None:
    """It has an answer by then, and only a part of prompt and answer is in the cache again."""
    rings = KeptRings(RECENT)
    rings.hand_out([1])
    rings.expect(1, None, len(FIRST) + len(ANSWER))
    rings.begin({1: 0})
    rings.launched([1], [20])
    rings.ended(1, SCOPE, FIRST, ANSWER)
    assert rings.choose(SCOPE, [*FIRST, *ANSWER, *NEXT]) is None
    choice = rings.choose(SCOPE, FIRST[:26])
    assert choice is not None and (choice.first, choice.end) == (20 - RECENT + LATE, 20)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(0, 8),
)
def test_a_taken_ring_holds_the_prompt_s_tokens(requests: list[tuple[int, int]], cut: int) -> None:
    """A model of the rings: what each position of a row was written for."""
    rings, width = KeptRings(RECENT), RECENT
    held: dict[int, dict[int, int]] = {}  # row: position: token
    for number, (row, seed) in enumerate(requests):
        prompt = [seed * 1000 + i for i in range(30)] + [9000 + number % 2 * cut]
        rings.hand_out([row])
        choice = rings.choose(SCOPE, prompt)
        prefix = choice.end if choice else 0
        rings.expect(row, choice, len(prompt))
        kept = rings.begin({row: prefix})
        ring: dict[int, int] = {}
        if row in kept:
            taken = kept[row]
            ring = {p: t for p, t in held[taken.row].items() if taken.first <= p < prefix}
            assert sorted(ring) == list(range(taken.first, prefix))
            assert all(prompt[p] == t for p, t in ring.items())
        said = [4000 + seed, 4001, 4002]
        for position, token in enumerate([*prompt, *said]):  # the last one by a late step
            if position >= prefix:
                ring = {p: t for p, t in ring.items() if p > position - width}
                ring[position] = token
        held[row] = ring
        rings.launched([row], [len(prompt)])
        rings.ended(row, SCOPE, prompt, said)


def test_rings_are_copied_before_any_of_them_is_written() -> None:
    """In one step row 2 takes the ring of row 1, row 1 that of row 3, and row 3 begins anew."""
    rings = KeptRings(4 + LATE)
    store = WindowStore(WindowShape(2, 4, 2, 8, 12, 0, 4 + LATE, torch.float32), "cpu", rings=rings)
    for row in (1, 3):
        store.hand_out([row])
        store.take_fresh([row])
        store.begin({row: 0})
        rings.launched([row], [40])
        rings.ended(row, (row,), FIRST, ANSWER)
    for ring in (store.ring_k, store.ring_v):
        ring.copy_(torch.randn_like(ring))
    before = [ring.clone() for ring in (store.ring_k, store.ring_v)]
    choices = {
        2: rings.choose((1,), [*FIRST, *ANSWER, *NEXT]),
        1: rings.choose((3,), [*FIRST, *ANSWER, *NEXT]),
    }
    store.hand_out([1, 2, 3])
    for row, choice in choices.items():
        rings.expect(row, choice, 54)
    store.begin({1: 49, 2: 49, 3: 0})
    for ring, old in zip((store.ring_k, store.ring_v), before, strict=True):
        assert ring[:, 2].equal(old[:, 1]) and ring[:, 1].equal(old[:, 3])
    assert store.ring_start.tolist() == [0, 45, 45, 0]
