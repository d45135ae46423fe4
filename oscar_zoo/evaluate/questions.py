"""What models and servers are asked: perplexity of text, recall of facts, and conversations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.measure import Predictions, TaskPrompt


@dataclass(frozen=True)
class Perplexity:
    """Windows of a text; every window starts at position 0 and predicts its tokens 1 .. length - 1.

    It is the exponential of the mean negative log-likelihood of the next token.
    """

    prompts: tuple[TaskPrompt, ...]
    name: str = "perplexity"

    @classmethod
    def from_tokens(
        cls, ids: Tensor, *, windows: int = 6, length: int = 2048, skip: int = 0
    ) -> Perplexity:
        """Cut `n` windows of `length` tokens from a text, `[N]` int64; window i begins at token
        `(len(ids) - length) * i // n`, and there are fewer when they would overlap. Predictions of
        the first `skip` positions are not scored."""
        if length > len(ids):
            raise UsageError(
                f"the text has {len(ids)} tokens, one window needs {length}.",
                hint="give a longer text with --data, or a smaller --length",
            )
        if windows < 1 or not 0 <= skip < length - 1:
            raise UsageError(
                f"{windows} windows of {length} tokens from position {skip} leave nothing to score."
            )
        number = min(windows, len(ids) // length)
        starts = [(len(ids) - length) * i // number for i in range(number)]
        scored = torch.arange(skip, length - 1, device="cpu")
        return cls(tuple(TaskPrompt(ids[start : start + length], scored) for start in starts))

    def count(self, prompt: TaskPrompt, said: Predictions) -> tuple[float, int]:
        """Summed negative log-likelihood in nats, and the number of predictions."""
        return float(said.losses.sum()), len(said.losses)

    def result(self, total: float, number: int) -> float:
        """`exp(mean)`; infinite when the exponential overflows."""
        mean = total / number
        return math.exp(mean) if mean < 700 else math.inf

    def describe(self) -> Mapping[str, int | float | str]:
        """Windows, their length and the scored predictions."""
        return {
            "windows": len(self.prompts),
            "length": len(self.prompts[0].ids),
            "predictions": sum(len(p.scored) for p in self.prompts),
        }


Unit = Literal["answer", "token"]
Encode = Callable[[str], list[int]]
SHALLOW, DEEP = 0.1, 0.9
"""Passkeys start between these fractions of the prompt."""

TABLE_LINES = 48
"""More lines than this and small models miss some without any quantization."""

PASSKEY_DIGITS, TABLE_DIGITS = 6, 4
CONSONANTS, VOWELS = "bdgklmnprstvz", "aeo"


@dataclass(frozen=True)
class Recall:
    """Recall of facts that lie so far back that every cache reads them from INT2.

    The questions stand at the end of the prompt. Two kinds of prompts take turns. Passkey:
    sentences with six-digit codes spread through text, then questions. Table: text, then lines
    ` Name = 1234`, then some of the names again. Answers are teacher-forced: an answer is right
    when the greedy prediction of each of its tokens is right, given the prompt and the true answers
    before it. `unit` counts whole answers, or single tokens of answers (a gentler number).
    """

    prompts: tuple[TaskPrompt, ...]
    seed: int
    unit: Unit = "answer"
    name: str = "recall"

    @classmethod
    def from_tokens(
        cls,
        ids: Tensor,
        encode: Encode,
        *,
        windows: Windows,
        answers: int = 64,
        per_prompt: int = 8,
        length: int = 2048,
        seed: int = 0,
        unit: Unit = "answer",
    ) -> Recall:
        """Prompts of at most `length` tokens with filler from a text, `[N]` int64; `answers` are
        rounded up to whole prompts."""
        if answers < 1 or per_prompt < 1:
            raise UsageError(
                f"{answers} answers with {per_prompt} per prompt leave nothing to ask."
            )
        rng = random.Random(seed)
        writer = _Writer(ids.tolist(), encode, rng, windows, length, per_prompt)
        number = -(-answers // per_prompt)
        return cls(
            tuple(writer.table() if i % 2 else writer.passkeys() for i in range(number)), seed, unit
        )

    def count(self, prompt: TaskPrompt, said: Predictions) -> tuple[float, int]:
        """Number of right answers and of all answers, or of their tokens."""
        right = said.right
        if self.unit == "token":
            return float(right.sum()), len(right)
        return float(sum(bool(right[first:last].all()) for first, last in prompt.answers)), len(
            prompt.answers
        )

    def result(self, total: float, number: int) -> float:
        """The fraction recalled, 0 .. 1."""
        return total / number

    def describe(self) -> Mapping[str, int | float | str]:
        """Prompts, answers, the longest prompt and the seed."""
        return {
            "prompts": len(self.prompts),
            "answers": sum(len(p.answers) for p in self.prompts),
            "length": max(len(p.ids) for p in self.prompts),
            "seed": self.seed,
            "unit": self.unit,
        }


@dataclass(frozen=True)
class _Writer:
    """Makes prompts; state is only that of `rng`."""

    filler: list[int]
    encode: Encode
    rng: random.Random
    windows: Windows
    length: int
    per_prompt: int

    def passkeys(self) -> TaskPrompt:
        """As many codes as questions, spread evenly with some jitter, and text between them."""
        names, codes = self._facts(self.per_prompt, PASSKEY_DIGITS)
        facts = [
            self.encode(f"\nThe access code of {name} is {code}.\n")
            for name, code in zip(names, codes, strict=True)
        ]
        order = self.rng.sample(range(len(names)), len(names))
        questions = [
            (f"\nQuestion: What is the access code of {names[i]}?\nAnswer: ", codes[i], "\n")
            for i in order
        ]
        tail, stretches = self._ask(questions)
        body = self.length - len(tail)
        size = max(map(len, facts))
        first, last = self._range(body, size)
        step = (last + size - first) // len(facts)
        starts = [first + step * i + self.rng.randint(0, step - size) for i in range(len(facts))]
        ids: list[int] = []
        for start, fact in zip(starts, facts, strict=True):
            ids += self._text(start - len(ids)) + fact
        return with_answers(ids + self._text(body - len(ids)), tail, stretches)

    def table(self) -> TaskPrompt:
        """Text, then lines of facts until the questions begin.

        Facts that reach into the recent window are not asked for.
        """
        names, codes = self._facts(TABLE_LINES, TABLE_DIGITS)
        rows = [self.encode(f"\n {name} = {code}") for name, code in zip(names, codes, strict=True)]
        ends = list(accumulate(map(len, rows)))
        far = [i for i, end in enumerate(ends) if ends[-1] - end >= self.windows.recent]
        if len(far) < self.per_prompt:
            raise self._too_short()
        asked = self.rng.sample(far, self.per_prompt)
        tail, stretches = self._ask([(f"\n {names[i]} = ", codes[i], "") for i in asked])
        before = self.length - len(tail) - ends[-1]
        if before < self.windows.sink:
            raise self._too_short()
        return with_answers(
            self._text(before) + [token for row in rows for token in row], tail, stretches
        )

    def _ask(
        self, questions: list[tuple[str, str, str]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of all questions with their answers, and where in them the answers stand."""
        tail: list[int] = []
        stretches = []
        for before, answer, after in questions:
            tail += self.encode(before)
            stretches.append((len(tail), len(tail) + len(self.encode(answer))))
            tail += self.encode(answer) + (self.encode(after) if after else [])
        return tail, stretches

    def _range(self, body: int, fact: int) -> tuple[int, int]:
        """First and last start of a fact of `fact` tokens, if questions begin at `body`."""
        first = max(self.windows.sink, round(SHALLOW * self.length))
        last = min(body - self.windows.recent - fact, round(DEEP * self.length))
        if last + fact - first < self.per_prompt * fact:
            raise self._too_short()
        return first, last

    def _too_short(self) -> UsageError:
        return UsageError(
            f"{self.length} tokens leave no room for {self.per_prompt} facts outside the windows "
            f"({self.windows.sink} first and {self.windows.recent} last tokens).",
            hint="use a larger --length, or smaller windows (--sink, --recent)",
        )

    def _facts(self, number: int, digits: int) -> tuple[list[str], list[str]]:
        names = invented_names(self.rng, number)
        return names, ["".join(self.rng.choices("0123456789", k=digits)) for _ in names]

    def _text(self, number: int) -> list[int]:
        if number <= 0:
            return []
        if number >= len(self.filler):
            raise UsageError(
                f"the text has {len(self.filler)} tokens, a prompt needs {number} of them as"
                " filler."
            )
        start = self.rng.randrange(len(self.filler) - number)
        return self.filler[start : start + number]


def invented_names(rng: random.Random, count: int) -> list[str]:
    """Distinct names of two or three syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = rng.choice((2, 2, 3))
        letters = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
        found["".join(letters).title()] = None
    return list(found)


def with_answers(body: list[int], tail: list[int], stretches: list[tuple[int, int]]) -> TaskPrompt:
    """A prompt whose answers are `stretches` of `tail`."""
    # The prediction of a token is made at the position before it.
    scored = [len(body) + i - 1 for first, last in stretches for i in range(first, last)]
    answers, at = [], 0
    for first, last in stretches:
        answers.append((at, at + last - first))
        at += last - first
    return TaskPrompt(
        torch.tensor(body + tail, device="cpu"), torch.tensor(scored, device="cpu"), tuple(answers)
    )


ROOM = 64
"""Tokens between two questions beyond the recent window, so that whole pages of the last answer are
behind it."""


@dataclass(frozen=True)
class Conversation:
    """A long text with facts, then questions, each followed by its own answer: token ids of the
    user's turns, the first of which holds the context, and the right answer to each."""

    says: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


def conversations(
    ids: Tensor,
    encode: Encode,
    *,
    windows: Windows,
    number: int,
    turns: int = 3,
    length: int = 2000,
    seed: int = 0,
) -> tuple[Conversation, ...]:
    """Conversations of at most `length` tokens each, from a text, `[N]` int64.

    More text than the recent window stands between two questions, as a user may paste it. A server
    that reuses its cache therefore reads the context, the questions and its own answers as INT2.
    """
    between = windows.recent + ROOM
    least = windows.sink + windows.recent + between * (turns - 1)
    if length < 2 * least:
        raise UsageError(
            f"{length} tokens are too few for a conversation of {turns} turns with windows of"
            f" {windows.sink} first and {windows.recent} last tokens.",
            hint=f"--length of at least {2 * least}",
        )
    recall = Recall.from_tokens(
        ids,
        encode,
        windows=windows,
        answers=number * turns,
        per_prompt=turns,
        length=length - between * (turns - 1),
        seed=seed,
    )
    rng = random.Random(seed)
    starts = [[rng.randrange(len(ids) - between) for _ in range(turns - 1)] for _ in recall.prompts]
    return tuple(
        _conversation(prompt, [tuple(ids[a : a + between].tolist()) for a in places])
        for prompt, places in zip(recall.prompts, starts, strict=True)
    )


def _conversation(prompt: TaskPrompt, between: Sequence[tuple[int, ...]]) -> Conversation:
    ids: tuple[int, ...] = tuple(prompt.ids.tolist())
    # A token is predicted at the position before it.
    places = [(int(prompt.scored[a]) + 1, int(prompt.scored[b - 1]) + 2) for a, b in prompt.answers]
    says, end = [], 0
    for (first, last), filler in zip(places, [(), *between], strict=True):
        says.append(filler + ids[end:first])
        end = last
    return Conversation(tuple(says), tuple(ids[first:last] for first, last in places))
