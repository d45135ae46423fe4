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


class Job(Spec):
    """A whole run of one engine.

    Attributes:
        arguments: command line of SGLang's server.
        cases: in this order.
        new_tokens: that every request generates.
        news: file the process appends one JSON object per line to.
    """

    arguments: tuple[str, ...]
    cases: tuple[Case, ...]
    new_tokens: Count
    news: str

    @property
    def warm_tokens(self) -> int:
        """New tokens of a warm-up request."""
        return min(WARM_TOKENS, self.new_tokens)

    def tokens(self, case: Case) -> int:
        """Tokens that go through the engine for `case`, warm-up included."""
        return case.batch * (2 * case.context + self.warm_tokens + self.new_tokens)

    @property
    def total_tokens(self) -> int:
        """Of all cases."""
        return sum(map(self.tokens, self.cases))
