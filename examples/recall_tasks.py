"""Training rows that need exact attention to distant tokens: recall, look-up, four choices,
copying.

A small model learns these only by reading its KV cache precisely, so that a coarse cache shows in
its answers. A row is a list of token ids with one loss weight per token: answers weigh much, filler
text little.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Tokens = NDArray[np.uint16]

FILLER_WEIGHT, LIST_WEIGHT, COPY_WEIGHT = 0.3, 0.1, 1.5
ANSWER_WEIGHT = 6.0
"""Loss weight of digits to be recalled; also marks them for measuring accuracy."""
LETTER_WEIGHT = 8.0
"""Loss weight of the letter that answers a question with four choices; also marks it."""

TASK_LENGTHS = (300, 600, 1000, 2000, 4000, 8000, 16000)
SHORTEST_TASK = 250
SHORTEST_RANDOM = 400
ATTRIBUTES = ("capital", "color", "owner", "leader", "symbol", "river", "emblem", "harbor")
SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi ga ge go ha he ka ke ki ko la le li lo lu ma me mi mo"
    " mu na ne ni no nu pa pe po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we za"
    " ze zo"
).split()


def invented_names(count: int = 6000, seed: int = 1) -> list[str]:
    """Distinct names of two or three syllables, sorted."""
    draw, names = random.Random(seed), set[str]()
    while len(names) < count:
        names.add(
            "".join(draw.choice(SYLLABLES) for _ in range(draw.choice([2, 2, 3]))).capitalize()
        )
    return sorted(names)


class Row:
    """Token ids with loss weights, appended piece by piece."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.weights: list[float] = []

    def put(self, tokens: Sequence[int], weight: float) -> None:
        """Append `tokens`, all with the same weight."""
        self.tokens.extend(tokens)
        self.weights.extend([weight] * len(tokens))


class RecallTasks:
    """Draws rows.

    Args:
        tokenizer: digits must be single tokens, and so must each letter A to D after a space.
        filler: token ids of ordinary text, from which the stretches between facts are cut.
        seed: of all draws.
    """

    def __init__(self, tokenizer: Tokenizer, filler: Tokens, seed: int) -> None:
        self._tokenizer = tokenizer
        self._filler = filler
        self._draw = np.random.default_rng(seed)
        self._names = [self._encode(f" {name}") for name in invented_names()]
        self._attributes = [self._encode(f" {attribute}") for attribute in ATTRIBUTES]
        self._digits = [self._encode(str(digit))[-1] for digit in range(10)]
        self._space = self._encode(" ")[:1]
        self._letters = [self._encode(f" {letter}") for letter in "ABCD"]
        if any(len(letter) != 1 for letter in self._letters):
            raise ValueError("the tokenizer splits ' A', ' B', ' C' or ' D': train it on more text")

    def row(self, length: int) -> tuple[list[int], list[float]]:
        """One row of exactly `length` tokens, made of several tasks, and its loss weights."""
        row = Row()
        sizes = [size for size in TASK_LENGTHS if size < length]
        while (left := length - len(row.tokens)) > 0:
            size = left if left < SHORTEST_RANDOM else min(left, int(self._draw.choice(sizes)))
            if size < SHORTEST_TASK:
                row.put(self._fill(size), FILLER_WEIGHT)
            else:
                self._task()(row, size)
        return row.tokens[:length], row.weights[:length]

    def _task(self) -> Callable[[Row, int], None]:
        tasks = (self._passkeys, self._dictionary, self._four_choices, self._copying)
        return tasks[int(self._draw.integers(0, len(tasks)))]

    def _passkeys(self, row: Row, length: int) -> None:
        """Codes hidden in text; some are asked for at the end."""
        count = int(self._draw.choice([1, 2, 4, 8]))
        names = self._draw.choice(len(self._names), count, replace=False)
        codes = [self._number(6) for _ in names]
        asked = self._draw.permutation(count)[: int(self._draw.integers(1, count + 1))]
        head, verb, end = (
            self._encode("\nThe access code of"),
            self._encode(" is"),
            self._encode(".\n"),
        )
        facts = [
            head + self._names[name] + verb + self._space + code + end
            for name, code in zip(names, codes, strict=True)
        ]
        self._scatter(row, facts, length - 40 * count - 40 * len(asked))
        question, mark = (
            self._encode("\nQuestion: What is the access code of"),
            self._encode("?\nAnswer:"),
        )
        for i in asked:
            row.put(question + self._names[names[i]] + mark + self._space, FILLER_WEIGHT)
            row.put(codes[i] + self._encode("\n"), ANSWER_WEIGHT)

    def _dictionary(self, row: Row, length: int) -> None:
        """A list of `name = number`; ten of its lines come again, to be completed."""
        count = max(2, min((length - 200) // 14, int(self._draw.integers(8, 120))))
        names = self._draw.choice(len(self._names), count, replace=False)
        numbers = [self._number(4) for _ in names]
        row.put(self._fill(max(0, length - 14 * count - 150)), FILLER_WEIGHT)
        lines = [
            self._encode("\n") + self._names[name] + self._encode(" =") + self._space
            for name in names
        ]
        for line, number in zip(lines, numbers, strict=True):
            row.put(line + number, LIST_WEIGHT)
        for i in self._draw.permutation(count)[:10]:
            row.put(lines[i], LIST_WEIGHT)
            row.put(numbers[i], ANSWER_WEIGHT)

    def _four_choices(self, row: Row, length: int) -> None:
        """Facts hidden in text; questions whose wrong choices are answers to other questions."""
        count = int(self._draw.integers(2, 10))
        owners = self._draw.choice(len(self._names), count, replace=False)
        attributes = self._draw.integers(0, len(ATTRIBUTES), count)
        values = self._draw.choice(len(self._names), count, replace=False)
        phrases = [
            self._attributes[attribute] + self._encode(" of") + self._names[owner]
            for attribute, owner in zip(attributes, owners, strict=True)
        ]
        the, verb, end = self._encode("\nThe"), self._encode(" is"), self._encode(".\n")
        facts = [
            the + phrase + verb + self._names[value] + end
            for phrase, value in zip(phrases, values, strict=True)
        ]
        questions = min(count, 6)
        self._scatter(row, facts, length - 18 * count - 60 * questions)
        for i in self._draw.permutation(count)[:questions]:
            choices, right = self._choices(int(i), values)
            row.put(
                self._encode("\nQuestion: What is the") + phrases[i] + self._encode("?"),
                FILLER_WEIGHT,
            )
            for letter, choice in zip("ABCD", choices, strict=True):
                row.put(self._encode(f"\n{letter}.") + self._names[choice], LIST_WEIGHT)
            row.put(self._encode("\nAnswer:"), FILLER_WEIGHT)
            row.put(self._letters[right], LETTER_WEIGHT)
            row.put(self._encode("\n"), FILLER_WEIGHT)

    def _choices(self, asked: int, values: NDArray[np.int64]) -> tuple[list[int], int]:
        """Four names, one of them `values[asked]`, and the place of that one."""
        wrong = [int(name) for name in self._draw.choice(len(self._names), 4, replace=False)[:3]]
        if len(values) >= 4:
            others = [i for i in self._draw.permutation(len(values)) if i != asked]
            wrong = [int(values[i]) for i in others[:3]]
        place = int(self._draw.integers(0, 4))
        return [*wrong[:place], int(values[asked]), *wrong[place:]], place

    def _copying(self, row: Row, length: int) -> None:
        """A stretch of text, other text, and the stretch again; its first tokens say which one."""
        count = int(self._draw.integers(20, 200))
        stretch = self._fill(count)
        gap = max(0, length - 2 * count - 20)
        before = int(self._draw.integers(0, gap + 1))
        row.put(self._fill(before), FILLER_WEIGHT)
        row.put(self._encode("\n") + stretch, FILLER_WEIGHT)
        row.put(self._fill(gap - before), FILLER_WEIGHT)
        row.put(self._encode("\nCopy the text again:\n") + stretch[:6], FILLER_WEIGHT)
        row.put(stretch[6:], COPY_WEIGHT)

    def _scatter(self, row: Row, facts: Sequence[Sequence[int]], filler: int) -> None:
        """Put `facts` at random places into `filler` tokens of text."""
        cuts = np.sort(self._draw.integers(0, max(filler, 1), len(facts)))
        done = 0
        for cut, fact in zip(cuts, facts, strict=True):
            row.put(self._fill(int(cut) - done), FILLER_WEIGHT)
            row.put(fact, FILLER_WEIGHT)
            done = int(cut)
        row.put(self._fill(max(filler - done, 0)), FILLER_WEIGHT)

    def _fill(self, count: int) -> list[int]:
        start = int(self._draw.integers(0, len(self._filler) - count - 1))
        return [int(token) for token in self._filler[start : start + count]]

    def _number(self, digits: int) -> list[int]:
        return [self._digits[i] for i in self._draw.integers(0, 10, digits)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
