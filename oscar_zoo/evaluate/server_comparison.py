"""A server's answers beside those of the in-process reference with the same chunks.

Perplexity must agree within a limit. Recall is compared answer by answer. Two runs over the same
prompts count as equal unless an exact sign test of the answers that only one of them has is
significant at 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.server_client import Answer, Scored, ServerClient, ServerFacts
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.generate import greedy_generate, only_attention, prefill_log_probabilities
from oscar_zoo.evaluate.questions import Conversation, Encode, Perplexity, conversations
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.statistics import sign_test
from oscar_zoo.models.loading import LoadedModel

LIMIT = 0.005
"""Largest relative difference of two perplexities that are the same."""
STATE_STEP = 256
"""Largest number of tokens between two saved states of a sequence in SGLang's prefix cache."""
CHANCE = 0.01
"""Of a difference in recall that is reported though nothing is wrong: a sweep makes some ten
comparisons."""


@dataclass(frozen=True)
class Perplexities:
    """`server` and `reference` are with INT2, `exact` is in process without quantization."""

    server: float
    reference: float
    exact: float

    @property
    def deviation(self) -> float:
        """Relative difference of the server from the reference."""
        return self.server / self.reference - 1


@dataclass(frozen=True)
class Recalled:
    """Numbers of right answers among `answers`: in a conversation (`None` when there was none),
    alone, and of the reference."""

    answers: int
    talking: int | None
    alone: int
    reference: int


@dataclass(frozen=True)
class ComparisonRow:
    """One server; what was not measured is `None`.

    Attributes:
        cold, warm: perplexity without reuse, and after a prefix-cache hit.
        warm_without_sinks: that of a reference whose first tokens are INT2 after a hit, to tell
            this from other errors.
        reused: tokens that every hit took from the cache.
        violations: one line per violated limit.
    """

    facts: ServerFacts
    cold: Perplexities | None
    warm: Perplexities | None
    warm_without_sinks: float | None
    reused: tuple[int, ...]
    recall: Recalled | None
    violations: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; a value that was not measured is null."""
        facts, recall = self.facts, self.recall
        return {
            "chunk": facts.chunk,
            "page_size": facts.page_size,
            "radix": facts.radix,
            "tensor_parallel": facts.tp,
            "sglang": facts.version,
            "dtype": facts.dtype,
            "capacity_tokens": facts.capacity,
            "perplexity": _numbers(self.cold),
            "perplexity_after_hit": _numbers(self.warm),
            "perplexity_after_hit_without_sinks": self.warm_without_sinks,
            "reused_tokens": list(self.reused),
            "recall": (
                None
                if recall is None
                else {
                    "answers": recall.answers,
                    "talking": None if recall.talking is None else recall.talking / recall.answers,
                    "alone": recall.alone / recall.answers,
                    "reference": recall.reference / recall.answers,
                }
            ),
            "violations": list(self.violations),
        }


class ReferenceRun:
    """Answers of the model in this process; each question is computed only once."""

    def __init__(
        self,
        model: LoadedModel,
        cache: CacheSpec,
        questions: ServerQuestions,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._cache, self._questions, self._tick = model, cache, questions, tick
        self._known: dict[tuple[Any, ...], Any] = {}

    @property
    def reuse_step(self) -> int:
        """Tokens from one place where a hit may end to the next, beside the pages of the cache."""
        return 1 if only_attention(self._model) else STATE_STEP

    def score(self, number: int, *, chunk: int, hit: int, sinks: bool = True) -> tuple[float, ...]:
        """Log-probabilities of text `number` with INT2; see `prefill_log_probabilities`."""
        text = self._questions.texts[number]
        chunk = min(chunk, len(text))

        def run() -> tuple[float, ...]:
            return prefill_log_probabilities(
                self._model, text, cache=self._cache, chunk_size=chunk, hit=hit, sinks=sinks
            )

        return tuple(self._once(("score", number, chunk, hit, sinks), run))

    def exact(self, number: int) -> tuple[float, ...]:
        """Log-probabilities of text `number` without quantization."""
        text = self._questions.texts[number]
        return tuple(
            self._once(
                ("exact", number),
                lambda: prefill_log_probabilities(
                    self._model, text, cache=None, chunk_size=len(text)
                ),
            )
        )

    def answer(self, turn: Turn, *, chunk: int) -> tuple[int, ...]:
        """The answer to the prompt of `turn`, without reuse."""

        def run() -> list[int]:
            return greedy_generate(
                self._model,
                turn.prompt,
                cache=self._cache,
                max_new_tokens=len(turn.right),
                chunk_size=chunk,
            )

        return tuple(self._once(("answer", turn.prompt, min(chunk, len(turn.prompt))), run))

    def _once(self, key: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = run()
            self._tick()
        return self._known[key]


def compare(
    run: ServerRun, reference: ReferenceRun, *, recent: int, limit: float = LIMIT
) -> ComparisonRow:
    """Compare `run` with the reference, and list violated limits; a hit prefills the `recent` last
    tokens again, and `limit` is the largest relative difference of perplexities."""
    facts, wrong = run.facts, _reuse(run, recent, reference.reuse_step)
    cold, warm, without = None, None, None
    hits = [scored.cached for scored in run.warm]
    if run.cold:
        known = [reference.score(i, chunk=facts.chunk, hit=0) for i in range(len(run.cold))]
        exact = [reference.exact(i) for i in range(len(run.cold))]
        cold = Perplexities(
            perplexity([s.values for s in run.cold]), perplexity(known), perplexity(exact)
        )
        wrong += _differs("perplexity", cold, limit)
    if run.warm and all(hits):
        # A hit of a model with states may end before the first token that was scored.
        scored = [len(s.values) for s in run.warm]
        exact = [reference.exact(i)[-n:] for i, n in enumerate(scored)]
        kept, lost = (
            perplexity(
                [
                    reference.score(i, chunk=facts.chunk, hit=hits[i], sinks=s)[-n:]
                    for i, n in enumerate(scored)
                ]
            )
            for s in (True, False)
        )
        warm, without = (
            Perplexities(perplexity([s.values for s in run.warm]), kept, perplexity(exact)),
            lost,
        )
        wrong += _differs("perplexity after a hit", warm, limit)
    recall, odd = _recall(run, reference)
    return ComparisonRow(facts, cold, warm, without, tuple(hits), recall, tuple(wrong + odd))


def perplexity(parts: Sequence[Sequence[float]]) -> float:
    """`exp` of minus the mean of all log-probabilities; infinite when it overflows."""
    mean = -sum(map(sum, parts)) / sum(map(len, parts))
    return math.exp(mean) if mean < 700 else math.inf


def _differs(what: str, found: Perplexities, limit: float) -> list[str]:
    if abs(found.deviation) <= limit:  # NaN is not
        return []
    return [
        f"{what} {found.server:.4f} is {100 * found.deviation:+.2f} % of the reference's"
        f" {found.reference:.4f} (limit {100 * limit:g} %)"
    ]


def _reuse(run: ServerRun, recent: int, step: int) -> list[str]:
    """Find hits that the server must not have had, and hits that it missed."""
    step, wrong = max(step, run.facts.page_size), []
    if any(scored.cached for scored in run.cold):
        wrong.append("tokens were reused after a flush")
    for turns in run.talks:
        for earlier, later in pairwise(turns):
            if later.talking is None or earlier.talking is None:
                continue
            whole = len(earlier.prompt) + len(earlier.talking.ids)
            most = min(whole, len(later.prompt) - recent)
            # An engine may stop before it caches the last token that it generates, and one with a
            # draft model finds pairs of tokens, of which there is one fewer.
            if not step * ((most - 2) // step) <= later.talking.cached <= most:
                wrong.append(
                    f"a turn reused {later.talking.cached:,} of {most:,} tokens of the conversation"
                    " before it"
                )
    if not all(scored.cached for scored in run.warm):
        wrong.append("a repeated prefix was not reused")
    return list(dict.fromkeys(wrong))


def _recall(run: ServerRun, reference: ReferenceRun) -> tuple[Recalled | None, list[str]]:
    turns = [turn for talk in run.talks for turn in talk]
    if not turns:
        return None, []
    alone = [turn.alone.ids == turn.right for turn in turns]
    known = [reference.answer(turn, chunk=run.facts.chunk) == turn.right for turn in turns]
    wrong = _unlike("recall", alone, "the reference", known)
    talking = [turn.talking.ids == turn.right for turn in turns if turn.talking is not None]
    if talking:
        wrong += _unlike("recall in conversations", talking, "the same prompts alone", alone)
    return Recalled(len(turns), sum(talking) if talking else None, sum(alone), sum(known)), wrong


def _unlike(what: str, found: Sequence[bool], other: str, want: Sequence[bool]) -> list[str]:
    """Whether two runs over the same questions differ by more than chance; an exact sign test."""
    gained = sum(a and not b for a, b in zip(found, want, strict=True))
    missed = sum(b and not a for a, b in zip(found, want, strict=True))
    if sign_test(gained, missed) >= CHANCE:
        return []
    return [
        f"{what}: {sum(found)} of {len(found)} right, {other} {sum(want)} ({gained} gained,"
        f" {missed} missed)"
    ]


def _numbers(found: Perplexities | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "server": found.server,
        "reference": found.reference,
        "deviation": found.deviation,
        "exact": found.exact,
    }


TURNS = 3
"""Questions of one conversation."""
PAGES = 128
"""Prefixes that are shared end where pages of up to this size end."""


@dataclass(frozen=True)
class ServerQuestions:
    """The questions for every server: windows of a text, and conversations for recall; both may be
    empty. Another request puts `shared` tokens of a window into the prefix cache before it is
    scored a second time."""

    texts: tuple[tuple[int, ...], ...]
    shared: int
    conversations: tuple[Conversation, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        talks = (
            sum(map(len, talk.says)) + sum(map(len, talk.answers)) for talk in self.conversations
        )
        return max([*map(len, self.texts), *talks], default=0)


@dataclass(frozen=True)
class Turn:
    """One question: everything up to the answer, as the server had it, the right answer, the one
    without reuse, and the one in the conversation, where the prefix cache holds the turns before
    (`None` without one)."""

    prompt: tuple[int, ...]
    right: tuple[int, ...]
    alone: Answer
    talking: Answer | None


@dataclass(frozen=True)
class ServerRun:
    """The answers of one server: of every text without reuse, and from its shared tokens on (none
    without a prefix cache), and the turns of every conversation."""

    facts: ServerFacts
    cold: tuple[Scored, ...]
    warm: tuple[Scored, ...]
    talks: tuple[tuple[Turn, ...], ...]


def make_questions(
    ids: Sequence[int],
    encode: Encode,
    *,
    tasks: Collection[str],
    exact: Windows,
    length: int,
    windows: int,
    answers: int,
) -> ServerQuestions:
    """Cut the questions from a text: windows and conversations of at most `length` tokens, with
    facts outside the high-precision windows `exact`; `answers` are rounded up to whole
    conversations."""
    shared = (length - exact.recent) // 2 // PAGES * PAGES
    if shared <= 0:
        raise UsageError(
            f"{length} tokens are too few to share a prefix.",
            hint=f"--length of at least {exact.recent + 2 * PAGES}",
        )
    whole = torch.tensor(list(ids), device="cpu")
    texts: tuple[tuple[int, ...], ...] = ()
    talks: tuple[Conversation, ...] = ()
    if "perplexity" in tasks:
        cut = Perplexity.from_tokens(whole, windows=windows, length=length).prompts
        texts = tuple(tuple(prompt.ids.tolist()) for prompt in cut)
    if "recall" in tasks:
        number = -(-answers // TURNS)
        talks = conversations(
            whole, encode, windows=exact, number=number, turns=TURNS, length=length
        )
    return ServerQuestions(texts, shared, talks)


def check_fits(facts: ServerFacts, questions: ServerQuestions) -> None:
    """Refuse a server that cannot be asked this."""
    if facts.cache_dtype != "int2":
        raise UsageError(
            f"the server has a {facts.cache_dtype} cache, not int2.",
            hint="oscar-zoo serve starts one that has",
        )
    most = min(facts.longest_input, facts.capacity)
    if questions.longest >= most:
        raise UsageError(
            f"the server takes fewer than {most:,} tokens, {questions.longest:,} are needed.",
            hint="lower --length",
        )


def requests_of(questions: ServerQuestions, *, radix: bool) -> int:
    """Number of ticks of `ask`."""
    turns = sum(len(talk.says) for talk in questions.conversations)
    return (len(questions.texts) + turns) * (2 if radix else 1)


def ask(
    client: ServerClient, questions: ServerQuestions, tick: Callable[[], None] = lambda: None
) -> ServerRun:
    """Ask a server, which must have no other user meanwhile, all questions.

    Requests go out one at a time, so chunks end where those of the reference end. A request without
    reuse comes after a flush of the prefix cache; the number of tokens that the server says it
    reused is recorded, so a run can be judged later.
    """
    facts = client.facts()
    check_fits(facts, questions)
    cold, warm, talks = [], [], []
    for text in questions.texts:
        client.flush()
        cold.append(client.score(text))
        tick()
        if facts.radix:
            client.flush()
            client.generate(text[: questions.shared], 1)
            warm.append(client.score(text, start=questions.shared))
            tick()
    for talk in questions.conversations:
        talks.append(_talk(client, talk, tick, radix=facts.radix))
    return ServerRun(facts, tuple(cold), tuple(warm), tuple(talks))


def _talk(
    client: ServerClient, talk: Conversation, tick: Callable[[], None], *, radix: bool
) -> tuple[Turn, ...]:
    """Ask the turns one after the other, then each of their prompts alone, which only makes sense
    with a prefix cache."""
    client.flush()
    prompts: list[tuple[int, ...]] = []
    talking: list[Answer] = []
    said: tuple[int, ...] = ()
    for says, right in zip(talk.says, talk.answers, strict=True):
        prompts.append(said + says)
        talking.append(client.generate(prompts[-1], len(right)))
        said = prompts[-1] + talking[-1].ids
        tick()
    turns = []
    for prompt, right, answer in zip(prompts, talk.answers, talking, strict=True):
        if not radix:
            turns.append(Turn(prompt, right, answer, None))
            continue
        client.flush()
        turns.append(Turn(prompt, right, client.generate(prompt, len(right)), answer))
        tick()
    return tuple(turns)
