"""Perplexity and recall of a running server. Needs no model in this process.

Requests go out one at a time, so chunks end where those of the reference end. A request "without
reuse" comes after a flush of the prefix cache; the number of tokens that the server says it reused
is recorded, so a run can be judged later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.server_client import Answer, Scored, ServerClient, ServerFacts
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.tasks.perplexity import Perplexity
from oscar_zoo.evaluate.tasks.recall import Encode
from oscar_zoo.evaluate.tasks.turns import Conversation, conversations

TURNS = 3
"""Questions of one conversation."""
PAGES = 128
"""Prefixes that are shared end where pages of up to this size end."""


@dataclass(frozen=True)
class ServerQuestions:
    """The questions for every server.

    Attributes:
        texts: windows of a text, token ids.
        shared: tokens of a window that another request puts into the prefix cache before it is
            scored a second time.
        conversations: for recall; may be empty, as `texts` may.
    """

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
    """One question.

    Attributes:
        prompt: everything up to the answer, as the server had it.
        right: the right answer.
        alone: the answer to `prompt` without reuse.
        talking: the answer in the conversation, where the prefix cache holds the turns before;
            `None` without one.
    """

    prompt: tuple[int, ...]
    right: tuple[int, ...]
    alone: Answer
    talking: Answer | None


@dataclass(frozen=True)
class ServerRun:
    """The answers of one server.

    Attributes:
        facts: the settings of the server.
        cold: of every text, without reuse.
        warm: of every text, from its shared tokens on; empty without a prefix cache.
        talks: the turns of every conversation.
    """

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
    """Cut the questions from a text.

    Args:
        encode: a tokenizer without special tokens.
        tasks: `perplexity`, `recall`, or both.
        exact: high-precision windows; facts lie outside them.
        length: tokens of a window and of a conversation, at most.
        windows: windows of the text; fewer are used when they would overlap.
        answers: recall questions, rounded up to whole conversations.
    """
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
    """Ask a server all questions.

    Args:
        client: of the server, which must have no other user meanwhile.
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
    """Ask the turns one after the other, then each of their prompts alone.

    Without a prefix cache only the second part makes sense.
    """
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
