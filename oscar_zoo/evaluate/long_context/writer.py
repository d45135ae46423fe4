"""Pieces of the prompts: filler, invented names and numbers, facts at a depth, and questions with
their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.tasks.base import TaskPrompt

Encode = Callable[[str], list[int]]
CONSONANTS, VOWELS = "bdgklmnprstvz", "aeo"


@dataclass(frozen=True)
class Question:
    """Words in front of answers, and the answers in the order in which they are expected.

    Attributes:
        text: ends where the first answer begins.
        answers: each is scored as a whole.
        joined: what stands between two of them.
    """

    text: str
    answers: tuple[str, ...]
    joined: str = ", "


@dataclass
class PromptWriter:
    """Draws the pieces of one prompt after the other.

    Attributes:
        filler: token ids of ordinary text.
        encode: a tokenizer without special tokens.
        length: tokens of a prompt, its questions and answers included.
        seed: the same seed gives the same prompts, whatever was drawn before.
    """

    filler: Sequence[int]
    encode: Encode
    length: int
    seed: str
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def names(self, count: int) -> list[str]:
        """Distinct invented names."""
        found: dict[str, None] = {}
        while len(found) < count:
            syllables = self.rng.choice((2, 2, 3))
            letters = (
                self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) for _ in range(syllables)
            )
            found["".join(letters).title()] = None
        return list(found)

    def number(self, digits: int) -> str:
        """Random digits."""
        return "".join(self.rng.choices("0123456789", k=digits))

    def spread(self, count: int) -> list[float]:
        """Ascending random depths, one in each of `count` equal parts."""
        return [(i + self.rng.random()) / count for i in range(count)]

    def prompt(
        self, facts: Sequence[tuple[float, str]], questions: Sequence[Question], *, fill: str = ""
    ) -> TaskPrompt:
        """Facts at their depths in filler, then the questions with their answers.

        Args:
            questions: in the order in which they are asked.
            fill: text to use in place of the filler; it is repeated as often as it takes.
        """
        tail, stretches = self._asked(questions)
        pieces = sorted(((depth, self.encode(text)) for depth, text in facts), key=lambda f: f[0])
        room = self.length - len(tail) - sum(len(ids) for _, ids in pieces)
        if room < 0:
            raise UsageError(
                f"{self.length} tokens have no room for the facts and the questions, which take"
                f" {self.length - room}.",
                hint="use longer prompts",
            )
        filler = self._filler(room, fill)
        body: list[int] = []
        done = 0
        for depth, ids in pieces:
            cut = round(depth * room)
            body += [*filler[done:cut], *ids]
            done = cut
        body += filler[done:]
        return _prompt_of(body, tail, stretches)

    def _filler(self, count: int, fill: str) -> list[int]:
        if fill:
            once = self.encode(fill)
            return (once * (count // len(once) + 1))[:count]
        if count > len(self.filler):
            raise UsageError(
                f"the text has {len(self.filler):,} tokens, and a prompt needs {count:,} of them.",
                hint="give a longer text with --data",
            )
        start = self.rng.randrange(len(self.filler) - count + 1)
        return list(self.filler[start : start + count])

    def _asked(self, questions: Sequence[Question]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of all questions with their answers, and where in them the answers stand."""
        tail: list[int] = []
        stretches = []
        for question in questions:
            tail += self.encode(question.text)
            for place, answer in enumerate(question.answers):
                if place:
                    tail += self.encode(question.joined)
                ids = self.encode(answer)
                stretches.append((len(tail), len(tail) + len(ids)))
                tail += ids
            tail += self.encode("\n")
        return tail, stretches


def _prompt_of(body: list[int], tail: list[int], stretches: list[tuple[int, int]]) -> TaskPrompt:
    # The prediction of a token is made at the position before it.
    scored = [len(body) + at - 1 for first, last in stretches for at in range(first, last)]
    answers, at = [], 0
    for first, last in stretches:
        answers.append((at, at + last - first))
        at += last - first
    end = stretches[-1][1]
    ids = torch.tensor(body + tail[:end], device="cpu")
    return TaskPrompt(ids, torch.tensor(scored, device="cpu"), tuple(answers))
