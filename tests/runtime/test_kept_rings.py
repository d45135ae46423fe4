"""Which ring of a request that has ended a prompt may take over, and when it is gone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_zoo.runtime.kept_rings import LATE, KeptRings
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

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


def test_steps_with_drafts_that_come_late_write_more_of_a_ring() -> None:
    rings = KeptRings(RECENT, drafts=3)
    tokens = talked(rings)
    assert rings.choose(SCOPE, [*tokens, *NEXT]) is None, "its window begins in front of the ring"
    choice = rings.choose(SCOPE, [*tokens, *NEXT, *range(6)])
    end = len(FIRST) + len(ANSWER) - 1
    assert choice is not None and choice.first == end - (RECENT + 2) + 3 * LATE


def test_a_long_turn_fills_its_window_by_itself() -> None:
    rings = KeptRings(RECENT)
    tokens = talked(rings)
    assert rings.choose(SCOPE, [*tokens, *range(RECENT - 1)]) is None
    assert rings.choose(SCOPE, [*tokens, *range(RECENT - 2)]) is not None


def test_a_ring_is_good_up_to_the_last_common_token() -> None:
    rings = KeptRings(RECENT)
    tokens = talked(rings)
    choice = rings.choose(SCOPE, [*tokens[:46], *range(8)])
    assert choice is not None and choice.end == 46
    assert rings.choose(SCOPE, [*tokens[:30], *range(20)]) is None
    assert rings.choose(SCOPE, [1, *tokens[1:], 7]) is None


def test_the_last_token_of_a_prompt_is_prefilled() -> None:
    rings = KeptRings(RECENT)
    tokens = talked(rings)
    assert rings.choose(SCOPE, tokens[:-1]) is None, "its window begins in front of the ring"
    rings = KeptRings(64)
    choice = rings.choose(SCOPE, talked(rings)[:45])
    assert choice is not None and choice.end == 44


def test_other_scopes_and_opaque_tokens_share_nothing() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    assert rings.choose(("adapter",), turn) is None and rings.choose(None, turn) is None
    rings.begin({3: 0})
    rings.ended(3, None, FIRST, ANSWER)
    assert rings.choose(None, turn) is None


def test_nobody_chooses_a_row_that_was_handed_out() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    rings.hand_out([1])
    assert rings.choose(SCOPE, turn) is None


def test_a_ring_that_changes_owner_in_the_same_step_is_still_there() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    choice = rings.choose(SCOPE, turn)
    rings.hand_out([1, 2])
    rings.expect(2, choice, 53)
    assert list(rings.begin({1: 0, 2: 48})) == [2]


def test_a_ring_of_an_earlier_owner_is_gone() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    choice = rings.choose(SCOPE, turn)
    rings.hand_out([1])
    rings.begin({1: 0})
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


def test_a_flush_forgets_all() -> None:
    rings = KeptRings(RECENT)
    turn = [*talked(rings), *NEXT]
    rings.flush()
    assert rings.choose(SCOPE, turn) is None


def test_no_ring_is_kept_where_hits_do_not_refill() -> None:
    rings = KeptRings(0)
    assert rings.choose(SCOPE, [*talked(rings), *NEXT]) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(0, 8),
)
def test_a_ring_that_is_taken_holds_the_tokens_of_the_prompt(
    requests: list[tuple[int, int]], cut: int
) -> None:
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
