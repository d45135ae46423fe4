"""A model for the harness whose answers are kept: those of an earlier run are read, others asked
for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lm_eval.api.model import LM

from oscar_zoo.evaluate.benchmarks.answers import Answer, Answers, Key, request_key
from oscar_zoo.evaluate.benchmarks.client import Generation, chat_request, continuation_request

Ask = Callable[[Mapping[str, Any]], Answer]


class AnswersMissing(Exception):
    """Questions are open, and there is no server to ask; `args` is their number."""


class KeptModel(LM):  # type: ignore[misc]
    """One repeat of one cache.

    Args:
        ask: asks the server; `None` where only kept answers are wanted.

    Attributes:
        used: the answers in the order of the questions.
    """

    def __init__(
        self,
        arm: str,
        seed: int,
        generation: Generation,
        answers: Answers,
        *,
        ask: Ask | None,
        concurrency: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._arm, self._seed, self._generation = arm, seed, generation
        self._answers, self._ask, self._tick = answers, ask, tick
        self._concurrency = concurrency
        self._asked: Counter[str] = Counter()
        self.used: list[tuple[Key, Answer]] = []

    @property
    def tokenizer_name(self) -> str:
        """The server has the tokenizer."""
        return "server"

    def chat_template(self, *_: Any) -> str:
        """The server has the template."""
        return "server"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        """Messages as text, for the way through the harness; the server applies its template."""
        return json.dumps([{"role": one["role"], "content": one["content"]} for one in messages])

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The text of every answer, without its reasoning."""
        asked = [
            chat_request(json.loads(one.args[0]), self._generation, self._seed) for one in requests
        ]
        return [answer.text for answer in self._all(asked)]

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """The log-probability of every continuation.

        Whether it is the most likely one is not asked for; no benchmark here reads it.
        """
        asked = [continuation_request(*one.args[:2]) for one in requests]
        return [(answer.log_probability or 0.0, False) for answer in self._all(asked)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """No benchmark here asks for it."""
        raise NotImplementedError

    def _all(self, asked: Sequence[Mapping[str, Any]]) -> list[Answer]:
        keys = [self._key(request) for request in asked]
        open_ = [at for at, key in enumerate(keys) if self._answers.get(key) is None]
        for _ in range(len(asked) - len(open_)):
            self._tick()
        if open_ and self._ask is None:
            raise AnswersMissing(len(open_))
        self._fill([(keys[at], asked[at]) for at in open_])
        found = [self._answers.get(key) for key in keys]
        self.used += zip(keys, found, strict=True)  # type: ignore[arg-type]
        return found  # type: ignore[return-value]

    def _key(self, request: Mapping[str, Any]) -> Key:
        hashed = request_key(request)
        self._asked[hashed] += 1
        return Key(self._arm, self._seed, hashed, self._asked[hashed] - 1)

    def _fill(self, questions: Sequence[tuple[Key, Mapping[str, Any]]]) -> None:
        """Ask; the first failure ends it, and answers that were on their way are kept.

        Ctrl-C does not wait for them, because the end of the server ends them.
        """

        def one(question: tuple[Key, Mapping[str, Any]]) -> None:
            key, request = question
            assert self._ask is not None
            self._answers.keep(key, self._ask(request))
            self._tick()

        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="ask")
        waits = True
        try:
            for _ in pool.map(one, questions):
                pass
        except (KeyboardInterrupt, SystemExit):
            waits = False
            raise
        finally:
            pool.shutdown(wait=waits, cancel_futures=True)
