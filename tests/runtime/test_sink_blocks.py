"""Sink blocks: who shares, who waits, who is pushed out; and a small engine that reads what it was
told to read.

The engine keeps in every cell of every block the tokens up to it, and writes as kernels do: a
request writes its new first tokens to the block of its row, whatever is there. So a block that is
shared too early, written while others read it, or given away too early shows as a cell with
somebody else's tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from int2_test_plugin.mutants import EarlySinks

from oscar_zoo.runtime.sink_blocks import MISS, Place, PromptKey, SinkBlocks

WIDTH, RECENT, ROWS = 4, 3, 3


def prompt(tokens: Any, scope: tuple[str, ...] | None = (), width: int = WIDTH) -> PromptKey:
    return PromptKey(scope, tuple(tokens)[:width], len(tokens))


def blocks(idle: int = 1, kind: type[SinkBlocks] = SinkBlocks) -> SinkBlocks:
    return kind(WIDTH, 1 + ROWS + idle, RECENT)


def start(
    sinks: SinkBlocks, row: int, tokens: Any, prefix: int = 0, end: int | None = None, **scope: Any
) -> Place:
    sinks.admit([row], [prompt(tokens, **scope)])
    (place,) = sinks.begin([(row, prefix)])
    sinks.launched([row], [len(tokens) if end is None else end])
    return place


LONG = tuple(range(20))


def test_the_second_request_shares_the_block_of_the_first() -> None:
    sinks = blocks()
    first = start(sinks, 1, LONG)
    assert sinks.reprefill_tail(prompt(LONG)) == RECENT
    assert start(sinks, 2, LONG, prefix=10) == Place(2, first.block, 0)
    assert [*sinks.counts().values()] == [1, 0, 1, 1, 0, 0, 0]
    sinks.release(1, prompt(LONG))
    sinks.release(2, prompt(LONG))
    assert (sinks.in_use, sinks.idle) == (0, 1)
    assert start(sinks, 3, LONG, prefix=10) == Place(3, first.block, 0)


def test_a_block_between_two_chunks_is_nobody_elses() -> None:
    sinks = blocks()
    start(sinks, 1, LONG, end=WIDTH - 1)
    assert sinks.reprefill_tail(prompt(LONG)) == MISS
    second = start(sinks, 2, LONG)
    sinks.launched([1], [len(LONG)])  # the first is complete too now, and stays alone
    assert sinks.reprefill_tail(prompt(LONG)) == RECENT
    assert start(sinks, 3, LONG, prefix=10).block == second.block


@pytest.mark.parametrize(
    ("length", "page_size", "tail"),
    [
        (WIDTH + RECENT - 1, 1, MISS),
        (WIDTH + RECENT, 1, RECENT),
        (WIDTH + RECENT + 1, 3, MISS),  # the hit ends at 3, inside the block
        (WIDTH + RECENT + 2, 3, RECENT),
    ],
)
def test_a_hit_passes_the_sinks_or_does_not_happen(length: int, page_size: int, tail: int) -> None:
    sinks = blocks()
    start(sinks, 1, LONG)
    assert sinks.reprefill_tail(prompt(LONG[:length]), page_size) == tail


def test_what_is_shared_depends_on_more_than_tokens() -> None:
    sinks = blocks()
    start(sinks, 1, LONG, scope=("adapter",))
    start(sinks, 2, LONG, scope=None)  # embeddings in place of tokens
    assert sinks.reprefill_tail(prompt(LONG, ("adapter",))) == RECENT
    assert sinks.reprefill_tail(prompt(LONG)) == sinks.reprefill_tail(prompt(LONG, None)) == MISS


def test_idle_blocks_go_in_the_order_they_were_used() -> None:
    sinks = SinkBlocks(WIDTH, 1 + 2, RECENT)
    texts = [(i, *LONG) for i in range(4)]
    for text in texts[:2]:
        start(sinks, 1, text)
        sinks.release(1, prompt(text))
    start(sinks, 1, texts[0], prefix=10)
    sinks.release(1, prompt(texts[0]))
    start(sinks, 1, texts[2])
    assert [sinks.reprefill_tail(prompt(text)) for text in texts] == [RECENT, MISS, RECENT, MISS]
    start(sinks, 2, texts[1])
    start(sinks, 2, texts[3])  # row 2 was reused without a word
    assert [*sinks.counts().values()] == [2, 0, 1, 5, 1, 0, 0]
    with pytest.raises(RuntimeError, match="all 3 sink blocks are in use"):
        start(sinks, 3, texts[3])


def test_in_one_step_sharing_comes_before_pushing_out() -> None:
    sinks = SinkBlocks(WIDTH, 1 + 2, RECENT)
    texts = [(i, *LONG) for i in range(3)]
    for text in texts[:2]:
        start(sinks, 1, text)
        sinks.release(1, prompt(text))
    sinks.admit([1, 2], [prompt(texts[2]), prompt(texts[0])])
    new, shared = sinks.begin([(1, 0), (2, 10)])
    assert shared.sink_from == 0 and new.block != shared.block and sinks.lost == 0


def test_an_answer_completes_the_block_of_a_short_prompt() -> None:
    sinks = blocks()
    start(sinks, 1, LONG[:2])
    sinks.release(1, prompt(LONG[:WIDTH]))  # the last token is not in the cache yet
    assert sinks.idle == 0
    start(sinks, 1, LONG[:2])
    sinks.release(1, prompt(LONG[: WIDTH + 1]))
    assert sinks.idle == 1 and sinks.reprefill_tail(prompt(LONG)) == RECENT


def test_a_hit_that_ends_among_the_sinks_starts_with_a_copy() -> None:
    sinks = blocks(idle=0)
    first = start(sinks, 1, LONG)
    assert start(sinks, 2, LONG, prefix=2) == Place(2, 2, 0, donor=first.block)
    sinks.release(1, prompt(LONG))
    start(sinks, 1, (5, *LONG))
    last = first.block
    assert start(sinks, 3, LONG, prefix=2) == Place(3, last, 0, donor=last)
    assert sinks.lost == 0


def test_without_sinks_nothing_is_given_away() -> None:
    sinks = SinkBlocks(0, 4, RECENT)
    assert start(sinks, 3, LONG) == Place(3, 0, 0)
    assert start(sinks, 2, LONG, prefix=5) == Place(2, 0, 5)
    assert sinks.reprefill_tail(prompt(LONG)) == RECENT
    assert not any(sinks.counts().values())


@dataclass
class Row:
    tokens: list[int]
    place: Place
    cached: int
    prompt: int


@dataclass
class Engine:
    """Requests in rows, a prefix cache that remembers every prefix it saw, and blocks with
    contents."""

    sinks: SinkBlocks
    most: int
    rows: dict[int, Row] = field(default_factory=dict)
    cells: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    host: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    tree: set[tuple[int, ...]] = field(default_factory=set)

    def admit(self, texts: list[list[int]], chunk: int, loss: int) -> None:
        """New requests in one step; the prefix cache has lost the last `loss` tokens of what it
        knows."""
        free = [row for row in range(1, self.most + 1) if row not in self.rows][: len(texts)]
        owners = []
        for row, text in zip(free, texts, strict=False):
            cached = (n for n in range(len(text) + 1) if tuple(text[:n]) in self.tree)
            known = max(cached, default=0)
            tail = self.sinks.reprefill_tail(self.prompt(text))
            owners.append((row, max(0, min(known - loss, len(text) - max(1, tail)))))
        texts = texts[: len(owners)]
        self.sinks.admit([row for row, _ in owners], map(self.prompt, texts))
        for (row, prefix), place, text in zip(owners, self.sinks.begin(owners), texts, strict=True):
            assert place.row == row and place.block > 0
            assert place.sink_from == 0 or self.sinks.recent is None
            self.rows[row] = Row(list(text), place, prefix, len(text))
        self.copy([self.rows[row].place for row, _ in owners])
        self.step([row for row, _ in owners], chunk)

    def copy(self, places: list[Place]) -> None:
        before = dict(self.cells)
        read = {place.host for place in places} - {None}
        assert not read & {place.saved for place in places}
        for place in places:
            for at in range(self.sinks.width):
                if place.donor is not None:
                    self.cells[place.block, at] = before[place.donor, at]
                if place.saved is not None:
                    self.host[place.saved, at] = before[place.block, at]
                if place.host is not None:
                    self.cells[place.block, at] = self.host[place.host, at]

    def step(self, rows: list[int], chunk: int) -> None:
        """Prefill up to `chunk` tokens more of these rows: everybody reads, then everybody
        writes."""
        ends = [min(self.rows[row].prompt, self.rows[row].cached + chunk) for row in rows]
        self.sinks.launched(rows, ends)
        for row in rows:
            self.check(row)
        for row, end in zip(rows, ends, strict=True):
            self.write(row, end)

    def decode(self, token: int) -> None:
        for row, owner in self.rows.items():
            if owner.cached >= owner.prompt:
                owner.tokens += [token] if len(owner.tokens) == owner.cached else []
                self.write(row, owner.cached + 1)
                owner.tokens.append(token)

    def write(self, row: int, end: int) -> None:
        owner = self.rows[row]
        for position in range(owner.cached, min(end, self.sinks.width)):
            self.cells[owner.place.block, position] = tuple(owner.tokens[: position + 1])
        owner.cached = end
        if end <= owner.prompt:
            self.tree.update(tuple(owner.tokens[:n]) for n in range(1, end + 1))

    def check(self, row: int) -> None:
        owner = self.rows[row]
        for position in range(owner.place.sink_from, min(owner.cached, self.sinks.width)):
            assert self.cells[owner.place.block, position] == tuple(owner.tokens[: position + 1])

    def free(self, row: int) -> None:
        owner = self.rows.pop(row)
        if owner.cached >= owner.prompt:
            self.tree.update(tuple(owner.tokens[:n]) for n in range(1, owner.cached + 1))
        self.sinks.release(row, self.prompt(owner.tokens))

    def prompt(self, tokens: list[int]) -> PromptKey:
        return prompt(tokens, width=self.sinks.width)


# Few prompts, blocks and rows, so that they meet.
TEXT = st.sampled_from([[0], [1], [0] * 5, [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 1, 1], [0, 0]])
CHUNK, LOSS = st.sampled_from([9, 9, 2, 1]), st.sampled_from([0, 0, 1, 2])
CALLS = st.one_of(
    st.tuples(st.just("admit"), st.lists(TEXT, min_size=1, max_size=2), CHUNK, LOSS),
    st.tuples(st.just("chunk"), CHUNK),
    st.tuples(st.just("decode"), st.integers(0, 1)),
    st.tuples(st.just("free"), st.integers(0, 2)),
    st.tuples(st.just("flush")),
)


def run(sinks: SinkBlocks, calls: list[tuple[Any, ...]], rows: int = ROWS) -> None:
    engine = Engine(sinks, rows)
    for call in calls:
        match call:
            case "admit", texts, chunk, loss:
                engine.admit(texts, chunk, loss)
            case "chunk", size:
                engine.step([row for row, x in engine.rows.items() if x.cached < x.prompt], size)
            case "decode", token:
                engine.decode(token)
            case "free", index if engine.rows:
                engine.free(sorted(engine.rows)[index % len(engine.rows)])
            case ("flush",) if not engine.rows:
                sinks.flush()
                engine.tree.clear()
        for row in engine.rows:
            engine.check(row)
        used = {owner.place.block for owner in engine.rows.values()}
        assert sinks.in_use == len(used) and sinks.in_use + sinks.idle < sinks.num_blocks
    if sinks.recent is not None:
        assert sinks.lost == 0


@given(
    calls=st.lists(CALLS, min_size=20, max_size=60),
    idle=st.integers(0, 1),
    recent=st.sampled_from([1, None]),
    host=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_everybody_reads_their_own_first_tokens(
    calls: list[Any], idle: int, recent: int | None, host: int
) -> None:
    run(SinkBlocks(3, 1 + 2 + idle, recent, host), calls, rows=2)


def test_the_engine_notices_a_block_shared_too_early() -> None:
    text = [0] * 9
    calls = [
        ("admit", [text], 9, 0),
        ("free", 0),
        *[("admit", [[1, i, 0, 0, 0, 0, 0, 0]], 9, 0) for i in (0, 1)],
        ("admit", [[1, 1, 1, 1, 1, 1, 1, 1]], 9, 0),
        *[("free", 0)] * 3,
        ("admit", [text], 2, 0),
        ("admit", [text], 9, 0),
    ]
    run(blocks(idle=0), calls)
    with pytest.raises((AssertionError, KeyError)):
        run(blocks(idle=0, kind=EarlySinks), calls)
