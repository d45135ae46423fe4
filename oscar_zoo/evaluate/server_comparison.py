"""A server's answers beside those of the in-process reference with the same chunks.

Perplexity must agree within a limit. Recall over the same prompts counts as equal unless an exact
sign test of the answers that only one run has is significant at 1 %.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from oscar_kernels.cache import MOST_DRAFTS
from oscar_zoo.artifact.specs import ServingRecipe, Windows
from oscar_zoo.engines.server_client import Answer, Scored, ServerClient, ServerFacts
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.caches import Artifact, encoder
from oscar_zoo.evaluate.generate import greedy_generate, only_attention, prefill_log_probabilities
from oscar_zoo.evaluate.measure import logits_of, losses, simulating
from oscar_zoo.evaluate.outcome import (
    Perplexities,
    Recalled,
    ServedArtifact,
    ServerReport,
    ServerRow,
)
from oscar_zoo.evaluate.questions import Conversation, Encode, Perplexity, conversations
from oscar_zoo.evaluate.shared import Progress, ticking
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.statistics import sign_test
from oscar_zoo.models.loading import LoadedModel

if TYPE_CHECKING:
    from oscar_zoo.evaluate.in_process import Subject

LIMIT = 0.005
"""Largest relative difference of two perplexities that are the same."""
STATE_STEP = 256
"""Largest number of tokens between two saved states of a sequence in SGLang's prefix cache."""
CHANCE = 0.01
"""Of a difference in recall that is reported where nothing is wrong; a sweep makes some ten."""
TURNS = 3
"""Questions of one conversation."""
PAGES = 128
"""Prefixes that are shared end where pages of up to this size end."""


@dataclass(frozen=True)
class ServerQuestions:
    """Windows of a text, and conversations for recall; both may be empty. Another request puts
    `shared` tokens of a window into the prefix cache before it is scored a second time."""

    texts: tuple[tuple[int, ...], ...]
    shared: int
    conversations: tuple[Conversation, ...]

    @property
    def longest(self) -> int:
        talks = (sum(len(a) + len(b) for a, b in talk) for talk in self.conversations)
        return max([*map(len, self.texts), *talks], default=0)

    @property
    def turns(self) -> int:
        return sum(map(len, self.conversations))


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
    """From a text: windows and conversations of at most `length` tokens, with facts outside the
    high-precision windows `exact`; `answers` are rounded up to whole conversations."""
    shared = (length - exact.recent) // 2 // PAGES * PAGES
    if shared <= 0:
        raise UsageError(
            f"{length} tokens are too few to share a prefix.",
            hint=f"--length of at least {exact.recent + 2 * PAGES}",
        )
    whole = torch.tensor(list(ids), device="cpu")
    texts, talks = tuple[tuple[int, ...], ...](), tuple[Conversation, ...]()
    if "perplexity" in tasks:
        cut = Perplexity.from_tokens(whole, windows=windows, length=length).prompts
        texts = tuple(tuple(prompt.ids.tolist()) for prompt in cut)
    if "recall" in tasks:
        size = {"number": -(-answers // TURNS), "turns": TURNS, "length": length}
        talks = conversations(whole, encode, windows=exact, **size)
    return ServerQuestions(texts, shared, talks)


@dataclass(frozen=True)
class Turn:
    """One question: everything up to the answer, as the server had it, the right answer, the one
    without reuse, and the one in the conversation (`None` without a prefix cache)."""

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


def ask(
    client: ServerClient, questions: ServerQuestions, tick: Callable[[], None] = lambda: None
) -> ServerRun:
    """Ask a server, which must have no other user meanwhile, all questions, one at a time, so that
    chunks end where those of the reference end. A request without reuse comes after a flush of the
    prefix cache; the number of tokens that the server says it reused is judged later."""
    facts = client.facts()
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
    cold, warm = [], []
    for text in questions.texts:
        client.flush()
        cold.append(client.score(text))
        tick()
        if facts.radix and facts.hits:
            client.flush()
            client.generate(text[: questions.shared], 1)
            warm.append(client.score(text, start=questions.shared))
            tick()
    talks = [_talk(client, talk, tick, radix=facts.radix) for talk in questions.conversations]
    return ServerRun(facts, tuple(cold), tuple(warm), tuple(talks))


def _talk(
    client: ServerClient, talk: Conversation, tick: Callable[[], None], *, radix: bool
) -> tuple[Turn, ...]:
    """Ask the turns one after the other, then each of their prompts alone, which only makes sense
    with a prefix cache."""
    client.flush()
    turns, said = list[Turn](), tuple[int, ...]()
    for says, right in talk:
        prompt = said + says
        answer = client.generate(prompt, len(right))
        turns.append(Turn(prompt, right, answer, answer if radix else None))
        said = prompt + answer.ids
        tick()
    for at, turn in enumerate(turns if radix else ()):
        client.flush()
        answer = client.generate(turn.prompt, len(turn.right))
        turns[at] = replace(turn, alone=answer)
        tick()
    return tuple(turns)


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
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.recent = cache.recipe.windows.recent
        self.reuse_step = 1 if only_attention(model) else STATE_STEP
        """Tokens from one place where a hit may end to the next, beside the pages of the cache."""

    def score(
        self, number: int, *, chunk: int, hit: int, sinks: bool = True, exact: bool = False
    ) -> tuple[float, ...]:
        """Log-probabilities of text `number` with INT2, or without quantization; see
        `prefill_log_probabilities`."""
        text = self._questions.texts[number]
        how: dict[str, Any] = {"chunk_size": min(chunk, len(text)), "hit": hit, "sinks": sinks}
        cache = None if exact else self._cache
        return self._once(
            ("score", number, exact, *how.values()),
            lambda: prefill_log_probabilities(self._model, text, cache=cache, **how),
        )

    def exact(self, number: int) -> tuple[float, ...]:
        return self.score(number, chunk=len(self._questions.texts[number]), hit=0, exact=True)

    def answer(self, turn: Turn, *, chunk: int) -> tuple[int, ...]:
        how = {"max_new_tokens": len(turn.right), "chunk_size": min(chunk, len(turn.prompt))}
        return self._once(
            ("answer", turn.prompt, *how.values()),
            lambda: greedy_generate(self._model, turn.prompt, cache=self._cache, **how),
        )

    def _once(self, key: tuple[Any, ...], run: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
        if key not in self._known:
            self._known[key] = tuple(run())
            self._tick()
        return self._known[key]


def measure_cache(
    model: LoadedModel,
    subject: Subject,
    *,
    artifact: Artifact,
    recipe: ServingRecipe,
    windows: int,
    length: int,
    progress: Progress,
) -> ServerReport:
    """An `OscarCache` in the place of a server. It takes as many tokens of a text at a time as are
    read as if they had come one by one."""
    from oscar_zoo.engines.transformers.cache import OscarCache

    ids = torch.tensor(encoder(model.tokenizer)(subject.text), device="cpu")
    cut = Perplexity.from_tokens(ids, windows=windows, length=length).prompts
    tick = ticking(progress, 3 * len(cut), "windows")
    chunk = min(MOST_DRAFTS, recipe.windows.recent)
    empty, found = OscarCache(model.model, *artifact, recipe), list[Scored]()
    for prompt in cut:
        cache, pieces = copy.deepcopy(empty), prompt.ids[None, :-1].to(model.device).split(chunk, 1)
        with torch.inference_mode():
            told = [model.model(piece, past_key_values=cache).logits[0] for piece in pieces]
        found.append(Scored(tuple((-losses(prompt, torch.cat(told))).tolist()), 0))
        tick()
    device, questions = str(model.device), ServerQuestions(tuple(tuple(p.ids) for p in cut), 0, ())
    facts = ServerFacts("", "int2", model.dtype, device, chunk, 1, False, 1, 0, 0)

    class Decoded(ReferenceRun):
        def score(self, number: int, *, exact: bool = False, **_: Any) -> tuple[float, ...]:
            with simulating(model, None if exact else self._cache):
                said = logits_of(model, cut[number])
            tick()
            return tuple((-losses(cut[number], said)).tolist())

    reference = Decoded(model, CacheSpec(*artifact, recipe), questions)
    row = compare(ServerRun(facts, tuple(found), (), ()), reference)
    of = subject.choice.name, ServedArtifact(subject.artifact.label, subject.artifact.digest)
    return ServerReport(*of, device, recipe, len(cut), length, 0, 0, (row,), ())


def compare(run: ServerRun, reference: ReferenceRun, *, limit: float = LIMIT) -> ServerRow:
    """Compare `run` with the reference, and list violated limits; `limit` is that of relative
    differences of perplexities."""
    facts, wrong, apart = run.facts, _reuse(run, reference), list[float]()
    hits = [scored.cached for scored in run.warm]

    def known(
        told: Sequence[Scored], hits: Sequence[int], *, sinks: bool = True
    ) -> list[tuple[float, ...]]:
        # A hit of a model with states may end before the first token that was scored.
        return [
            reference.score(i, chunk=facts.chunk, hit=hits[i], sinks=sinks)[-len(one.values) :]
            for i, one in enumerate(told)
        ]

    def beside(what: str, told: Sequence[Scored], hits: Sequence[int]) -> Perplexities:
        exact = [reference.exact(i)[-len(one.values) :] for i, one in enumerate(told)]
        theirs, ours = [one.values for one in told], known(told, hits)
        apart.append(max(abs(a - b) for a, b in zip(chain(*theirs), chain(*ours), strict=True)))
        found = Perplexities(perplexity(theirs), perplexity(ours), perplexity(exact))
        if not abs(found.deviation) <= limit:  # NaN is not
            wrong.append(
                f"{what} {found.server:.4f} is {100 * found.deviation:+.2f} % of the reference's"
                f" {found.reference:.4f} (limit {100 * limit:g} %)"
            )
        return found

    cold = beside("perplexity", run.cold, [0] * len(run.cold)) if run.cold else None
    warm, without = None, None
    if run.warm and all(hits):
        warm = beside("perplexity after a hit", run.warm, hits)
        without = perplexity(known(run.warm, hits, sinks=False))
    recall, odd = _recall(run, reference)
    return ServerRow(
        chunk=facts.chunk,
        page_size=facts.page_size,
        radix=facts.radix,
        tensor_parallel=facts.tp,
        engine=f"{facts.engine} {facts.version}" if facts.version else None,
        dtype=facts.dtype,
        capacity_tokens=facts.capacity or None,
        perplexity=cold,
        perplexity_after_hit=warm,
        perplexity_after_hit_without_sinks=without,
        reused_tokens=tuple(hits),
        recall=recall,
        violations=tuple(wrong + odd),
        largest_difference=apart[0] if run.cold else None,
    )


def perplexity(parts: Sequence[Sequence[float]]) -> float:
    """`exp` of minus the mean of all log-probabilities; infinite when it overflows."""
    return Perplexity(()).result(-sum(map(sum, parts)), sum(map(len, parts)))


def _reuse(run: ServerRun, reference: ReferenceRun) -> list[str]:
    """Find hits that the server must not have had, and hits that it missed. A hit prefills the
    last tokens again, which are those of the recent window."""
    recent, wrong = reference.recent, []
    step = max(reference.reuse_step, run.facts.page_size)
    if any(scored.cached for scored in run.cold):
        wrong.append("tokens were reused after a flush")
    for earlier, later in (pair for turns in run.talks for pair in pairwise(turns)):
        if later.talking is None or earlier.talking is None:
            continue
        whole = len(earlier.prompt) + len(earlier.talking.ids)
        most = min(whole, len(later.prompt) - recent)
        # An engine may stop before it caches the last token that it generates, and one with a draft
        # model finds pairs of tokens, of which there is one fewer.
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
    share = fmean(talking) if talking else None
    return Recalled(len(turns), share, fmean(alone), fmean(known)), wrong


def _unlike(what: str, found: Sequence[bool], other: str, want: Sequence[bool]) -> list[str]:
    gained = sum(a and not b for a, b in zip(found, want, strict=True))
    missed = sum(b and not a for a, b in zip(found, want, strict=True))
    if sign_test(gained, missed) >= CHANCE:
        return []
    return [
        f"{what}: {sum(found)} of {len(found)} right, {other} {sum(want)} ({gained} gained,"
        f" {missed} missed)"
    ]
