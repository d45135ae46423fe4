"""What an engine process is asked to measure, and how much work that is."""

from __future__ import annotations

from oscar_zoo.artifact.specs import Count, Spec

WARM_TOKENS = 8
"""New tokens of the request that runs before a case is timed."""
WARM_CONTEXT = 64
"""Tokens of the prompts that a warm-up has beside its long one."""
FOLLOW_UP = 64
"""Tokens that every turn of a conversation adds to the answer before it."""


class Case(Spec):
    """`batch` requests at the same time, each with a prompt of `context` tokens."""

    batch: Count
    context: Count

    def __str__(self) -> str:
        return f"{self.batch} x {self.context:,}"


def warm_prompts(case: Case) -> tuple[int, ...]:
    """Tokens of the prompts of the warm-up of `case`: as many requests as it has, and only one of
    them as long. Code depends on lengths and on the number of requests, but not on how many are
    long."""
    return (case.context, *[min(WARM_CONTEXT, case.context)] * (case.batch - 1))


class Bulk(Spec):
    """Requests that are all sent at once, timed until the last one is answered.

    With several `turns`, each request continues as a conversation: when all are answered, every
    prompt is sent again with its completion and `FOLLOW_UP` new tokens behind it.
    """

    requests: Count
    context: Count
    new_tokens: Count
    turns: Count = 1

    def __str__(self) -> str:
        what = "requests" if self.turns == 1 else f"conversations of {self.turns} turns, each"
        return f"{self.requests:,} {what} of {self.context:,} and {self.new_tokens:,} tokens"

    def prompt(self, turn: int) -> int:
        """Tokens of the prompt of turn 0, 1, ..."""
        return self.context + turn * (self.new_tokens + FOLLOW_UP)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return self.prompt(self.turns - 1) + self.new_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all requests, prompts and answers."""
        return self.requests * sum(
            self.prompt(turn) + self.new_tokens for turn in range(self.turns)
        )

    def warm(self, new_tokens: int) -> Bulk:
        """The warm-up before it, so that nothing is compiled while it is timed."""
        smaller = {
            "requests": min(2, self.requests),
            "new_tokens": min(new_tokens, self.new_tokens),
        }
        return self.model_copy(update=smaller)


class OfflineJob(Spec):
    """A whole run of one engine.

    Attributes:
        arguments: command line of SGLang's server.
        cases: in this order.
        new_tokens: that every request generates.
        repeats: how often each case is timed, after one warm-up.
        news: file the process appends one JSON object per line to.
        bulk: after the cases, if anything.
    """

    arguments: tuple[str, ...]
    cases: tuple[Case, ...]
    new_tokens: Count
    news: str
    repeats: Count = 1
    bulk: Bulk | None = None

    @property
    def warm_tokens(self) -> int:
        """New tokens of a warm-up request."""
        return min(WARM_TOKENS, self.new_tokens)

    def tokens(self, case: Case) -> int:
        """Tokens that go through the engine for `case`, its warm-up and all repeats included."""
        warm_up = sum(warm_prompts(case)) + case.batch * self.warm_tokens
        return warm_up + case.batch * self.repeats * (case.context + self.new_tokens)

    @property
    def total_tokens(self) -> int:
        """Of all cases, and of the bulk."""
        return sum(map(self.tokens, self.cases)) + self.bulk_tokens

    @property
    def bulk_tokens(self) -> int:
        """Tokens that go through the engine for the bulk, warm-up included."""
        return (
            0 if self.bulk is None else self.bulk.tokens + self.bulk.warm(self.warm_tokens).tokens
        )
