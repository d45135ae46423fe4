"""What models and servers are asked: perplexity of text, recall of facts, and conversations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.measure import TaskPrompt, losses, right

Encode = Callable[[str], list[int]]
Conversation = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""What the user says, of which the first holds a long text with facts, and the right answer to it,
turn by turn; token ids."""
SHALLOW, DEEP = 0.1, 0.9
"""Passkeys start between these fractions of the prompt."""
TABLE_LINES = 48
"""More lines than this and small models miss some without any quantization."""
PASSKEY_DIGITS, TABLE_DIGITS = 6, 4
CONSONANTS, VOWELS = "bdgklmnprstvz", "aeo"
ROOM = 64
"""Tokens between two questions beyond the recent window, so that whole pages are behind it."""


@dataclass(frozen=True)
class Perplexity:
    """Over windows of a text, each of which starts at position 0 and predicts its tokens 1 ..
    length - 1: the exponential of the mean negative log-likelihood of the next token."""

    prompts: tuple[TaskPrompt, ...]
    name: str = "perplexity"

    @classmethod
    def from_tokens(
        cls, ids: Tensor, *, windows: int = 6, length: int = 2048, skip: int = 0
    ) -> Perplexity:
        """Cut `n` windows of `length` tokens from a text, `[N]` int64; window i begins at token
        `(len(ids) - length) * i // n`, and there are fewer when they would overlap. Predictions of
        the first `skip` positions are not scored."""
        number = min(windows, len(ids) // length)
        if number < 1:
            raise UsageError(
                f"the text has {len(ids)} tokens, one window needs {length}.",
                hint="give a longer text with --data, or a smaller --length",
            )
        starts = [(len(ids) - length) * i // number for i in range(number)]
        scored = torch.arange(skip, length - 1, device="cpu")
        return cls(tuple(TaskPrompt(ids[start : start + length], scored) for start in starts))

    def count(self, prompt: TaskPrompt, logits: Tensor) -> tuple[float, int]:
        return float(losses(prompt, logits).sum()), len(prompt.scored)

    def result(self, total: float, number: int) -> float:
        mean = total / number
        return math.exp(mean) if mean < 700 else math.inf

    def describe(self) -> Mapping[str, int | str]:
        return {
            "windows": len(self.prompts),
            "length": len(self.prompts[0].ids),
            "predictions": sum(len(p.scored) for p in self.prompts),
        }


@dataclass(frozen=True)
class Recall:
    """Recall of facts that lie so far back that every cache reads them from INT2.

    Two kinds of prompts take turns: sentences with six-digit codes spread through text, then
    questions; and text, then lines ` Name = 1234`, then some of the names again. An answer is right
    when the greedy prediction of each of its tokens is right, given the prompt and the true answers
    before it. `unit` counts whole answers, or single tokens of answers (a gentler number).
    """

    prompts: tuple[TaskPrompt, ...]
    seed: int
    unit: Literal["answer", "token"] = "answer"
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
        unit: Literal["answer", "token"] = "answer",
    ) -> Recall:
        """Prompts of at most `length` tokens with filler from a text, `[N]` int64; `answers` are
        rounded up to whole prompts."""
        if answers < 1:
            raise UsageError("no answers are asked for.")
        writer = _Writer(ids.tolist(), encode, random.Random(seed), windows, length, per_prompt)
        numbers = range(-(-answers // per_prompt))
        prompts = tuple(writer.table() if i % 2 else writer.passkeys() for i in numbers)
        return cls(prompts, seed, unit)

    def count(self, prompt: TaskPrompt, logits: Tensor) -> tuple[float, int]:
        found = right(prompt, logits)
        if self.unit == "token":
            return float(found.sum()), len(found)
        whole = [bool(found[first:last].all()) for first, last in prompt.answers]
        return float(sum(whole)), len(whole)

    def result(self, total: float, number: int) -> float:
        return total / number

    def describe(self) -> Mapping[str, int | str]:
        return {
            "prompts": len(self.prompts),
            "answers": sum(len(p.answers) for p in self.prompts),
            "length": max(len(p.ids) for p in self.prompts),
            "seed": self.seed,
            "unit": self.unit,
        }


@dataclass(frozen=True)
class _Writer:
    filler: list[int]
    encode: Encode
    rng: random.Random
    windows: Windows
    length: int
    per_prompt: int

    def passkeys(self) -> TaskPrompt:
        """As many codes as questions, spread evenly with some jitter, and text between them."""
        names, codes = self._facts(self.per_prompt, PASSKEY_DIGITS)
        pairs = zip(names, codes, strict=True)
        facts = [self.encode(f"\nThe access code of {name} is {code}.\n") for name, code in pairs]
        pieces: list[tuple[str, bool]] = []
        for i in self.rng.sample(range(len(names)), len(names)):
            question = f"\nQuestion: What is the access code of {names[i]}?\nAnswer: "
            pieces += [(question, False), (codes[i], True), ("\n", False)]
        tail, stretches = encode_answers(self.encode, pieces)
        body, size = self.length - len(tail), max(map(len, facts))
        first = max(self.windows.sink, round(SHALLOW * self.length))
        last = min(body - self.windows.recent - size, round(DEEP * self.length))
        if last + size - first < self.per_prompt * size:
            raise self._too_short()
        step = (last + size - first) // len(facts)
        starts = [first + step * i + self.rng.randint(0, step - size) for i in range(len(facts))]
        ids: list[int] = []
        for start, fact in zip(starts, facts, strict=True):
            ids += self._text(start - len(ids)) + fact
        return with_answers(ids + self._text(body - len(ids)), tail, stretches)

    def table(self) -> TaskPrompt:
        """Text, then lines of facts until the questions begin. Facts that reach into the recent
        window are not asked for."""
        names, codes = self._facts(TABLE_LINES, TABLE_DIGITS)
        pairs = zip(names, codes, strict=True)
        rows = [self.encode(f"\n {name} = {code}") for name, code in pairs]
        ends = list(accumulate(map(len, rows)))
        far = [i for i, end in enumerate(ends) if ends[-1] - end >= self.windows.recent]
        if len(far) < self.per_prompt:
            raise self._too_short()
        pieces: list[tuple[str, bool]] = []
        for i in self.rng.sample(far, self.per_prompt):
            pieces += [(f"\n {names[i]} = ", False), (codes[i], True)]
        tail, stretches = encode_answers(self.encode, pieces)
        before = self.length - len(tail) - ends[-1]
        if before < self.windows.sink:
            raise self._too_short()
        return with_answers(self._text(before) + list(chain(*rows)), tail, stretches)

    def _too_short(self) -> UsageError:
        return UsageError(
            f"{self.length} tokens leave no room for {self.per_prompt} facts outside the windows "
            f"({self.windows.sink} first and {self.windows.recent} last tokens).",
            hint="use a larger --length, or smaller windows (--sink, --recent)",
        )

    def _facts(self, number: int, digits: int) -> tuple[list[str], list[str]]:
        names = invented_names(self.rng, number)
        return names, [random_digits(self.rng, digits) for _ in names]

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


def random_digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("0123456789", k=count))


def invented_names(rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = rng.choice((2, 2, 3))
        letters = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
        found["".join(letters).title()] = None
    return list(found)


def encode_answers(
    encode: Encode, pieces: Iterable[tuple[str, bool]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens of all pieces, and where in them those stand that are answers."""
    tail: list[int] = []
    stretches = []
    for text, is_answer in pieces:
        ids = encode(text)
        if is_answer:
            stretches.append((len(tail), len(tail) + len(ids)))
        tail += ids
    return tail, stretches


def with_answers(
    body: list[int], tail: list[int], stretches: Sequence[tuple[int, int]]
) -> TaskPrompt:
    """A prompt whose answers are `stretches` of `tail`."""
    # The prediction of a token is made at the position before it.
    scored = [len(body) + i - 1 for first, last in stretches for i in range(first, last)]
    ends = list(accumulate(last - first for first, last in stretches))
    return TaskPrompt(
        torch.tensor(body + tail, device="cpu"),
        torch.tensor(scored, device="cpu"),
        tuple(zip([0, *ends[:-1]], ends, strict=True)),
    )


def places_of(prompt: TaskPrompt) -> list[tuple[int, int]]:
    """Where in the tokens of a prompt its answers stand, `[first, end)`."""
    return [(int(prompt.scored[a]) + 1, int(prompt.scored[b - 1]) + 2) for a, b in prompt.answers]


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
    """Conversations of at most `length` tokens each, from a text, `[N]` int64. More text than the
    recent window stands between two questions, so a server that reuses its cache reads the context,
    the questions and its own answers as INT2."""
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
    rng, found = random.Random(seed), []
    for prompt in recall.prompts:
        starts = [rng.randrange(len(ids) - between) for _ in range(turns - 1)]
        fillers = [(), *(tuple(ids[a : a + between].tolist()) for a in starts)]
        whole, places = tuple(prompt.ids.tolist()), places_of(prompt)
        before = [0, *(end for _, end in places)]
        found.append(
            tuple(
                (filler + whole[end:first], whole[first:last])
                for end, (first, last), filler in zip(before, places, fillers, strict=False)
            )
        )
    return tuple(found)
