"""What an engine process is asked to measure, and how much work that is."""

from __future__ import annotations

from oscar_zoo.artifact.specs import Count, Spec

WARM_TOKENS = 8
"""New tokens of the request that runs before a case is timed."""


class Case(Spec):
    """`batch` requests at the same time, each with a prompt of `context` tokens."""

    batch: Count
    context: Count

    def __str__(self) -> str:
        return f"{self.batch} x {self.context:,}"


class Bulk(Spec):
    """Requests that are all there at once and wait for their turn: how long until the last one has its answer?"""

    requests: Count
    context: Count
    new_tokens: Count

    def __str__(self) -> str:
        return f"{self.requests:,} requests of {self.context:,} and {self.new_tokens:,} tokens"

    @property
    def warm(self) -> Case:
        """What runs before, so that nothing is compiled while the clock runs."""
        return Case(batch=min(2, self.requests), context=self.context)


class Job(Spec):
    """A whole run of one engine.

    Attributes:
        arguments: command line of SGLang's server.
        cases: in this order.
        new_tokens: that every request generates.
        news: file the process appends one JSON object per line to.
        bulk: after the cases, if anything.
    """

    arguments: tuple[str, ...]
    cases: tuple[Case, ...]
    new_tokens: Count
    news: str
    bulk: Bulk | None = None

    @property
    def warm_tokens(self) -> int:
        """New tokens of a warm-up request."""
        return min(WARM_TOKENS, self.new_tokens)

    def tokens(self, case: Case) -> int:
        """Tokens that go through the engine for `case`, warm-up included."""
        return case.batch * (2 * case.context + self.warm_tokens + self.new_tokens)

    @property
    def total_tokens(self) -> int:
        """Of all cases, and of the bulk."""
        return sum(map(self.tokens, self.cases)) + self.bulk_tokens

    @property
    def bulk_tokens(self) -> int:
        """Tokens that go through the engine for the bulk, warm-up included."""
        if self.bulk is None:
            return 0
        bulk, warm = self.bulk, self.bulk.warm
        return bulk.requests * (bulk.context + bulk.new_tokens) + warm.batch * (warm.context + self.warm_tokens)
