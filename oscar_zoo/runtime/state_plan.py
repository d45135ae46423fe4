"""How a worker of a hybrid model divides its memory between states and tokens.

Layers without full attention keep one state per request and per cached prefix, in slots of their
own. An engine gives them a share of the memory that suits uncompressed tokens. With INT2 tokens
that share would leave many more tokens than states, and requests would wait for a state beside
empty token slots. So the share is planned again here.

Two rules hold. There are as many tokens per state slot as the engine would have with uncompressed
tokens, so both grow. And there are no more states than requests and cached prefixes can use, which
matters for models with small states.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_PER_PREFIX = 512
"""One state slot is planned for so many cached tokens, beside those of running requests."""


@dataclass(frozen=True)
class StatePlan:
    """How many states a worker has, and how many requests they serve at a time."""

    slots: int
    requests: int


@dataclass(frozen=True)
class StateDemand:
    """What decides the number of states.

    Attributes:
        state: bytes of one state slot, over all layers that keep a state.
        per_request: state slots of a running request.
        row: bytes of the windows and tables of one request.
        token: bytes of one token slot.
        plain_token: bytes of one token in the engine's own, uncompressed cache.
        ratio: memory of states to memory of tokens that the engine wants with its own cache.
        requests: requests at a time that are asked for.
        most_tokens: token slots that are asked for at most; `None` for no limit.
    """

    state: int
    per_request: int
    row: int
    token: int
    plain_token: int
    ratio: float
    requests: int
    most_tokens: int | None = None

    def divide(self, memory: float) -> StatePlan:
        """The plan for `memory` bytes that states, rows and tokens share.

        Requests are fewer than asked when there are not enough states for them, but at least one.
        """
        # Memory of tokens per byte of states that keeps the engine's number of tokens per state.
        per_state_byte = self.token / (self.ratio * self.plain_token)
        slot = self.state * (1 + per_state_byte)
        running = int(memory / (slot + self.row / self.per_request)) // self.per_request
        requests = max(1, min(self.requests, running))
        left, busy = memory - requests * self.row, requests * self.per_request
        tokens = (left - busy * self.state) / (self.token + self.state / TOKENS_PER_PREFIX)
        if self.most_tokens is not None:
            tokens = min(tokens, self.most_tokens)
        wanted = busy + int(max(0.0, tokens)) // TOKENS_PER_PREFIX + 1
        return StatePlan(max(busy, min(int(left / slot), wanted)), requests)

    def tokens(self, memory: float, plan: StatePlan) -> int:
        """Token slots that fit into `memory` bytes beside the states and rows of `plan`."""
        taken = plan.requests * self.row + plan.slots * self.state
        return max(0, int((memory - taken) / self.token))

    def least_tokens(self, memory: float) -> int:
        """Token slots that fit at least, however large a state is, as long as one request fits.

        States never get more than the share that keeps the engine's tokens per state, and `state`
        does not count here.
        """
        left = memory - self.requests * self.row
        return max(0, int(left / (self.token + self.ratio * self.plain_token)))
