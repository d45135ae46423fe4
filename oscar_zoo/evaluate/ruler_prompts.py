"""The families of RULER (Hsieh et al., arXiv 2404.06654, section 3), as prompts whose answers can
be checked without generating text.

What a prompt asks for is as in RULER: needles in a haystack (one, several keys, several values,
several questions), variables that are assigned to each other, the most common words of a list, and
questions about documents. Two things differ. Answers are expected in an order that the question
names, so that the prediction of every token of an answer can be compared with the true one, given
the true tokens before it. And documents are invented ones, so that no data has to be fetched and no
model knows the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.measure import TaskPrompt
from oscar_zoo.evaluate.questions import Encode, invented_names, with_answers

CODE_DIGITS = 6
DISTRACTORS, VALUES, QUERIES, CHAIN, CHAINS = 7, 4, 4, 4, 3
COMMON, COMMON_TIMES, RARE_TIMES = 3, 30, 3
"""Most common words to name; how often they and the others stand in a list of a thousand words."""
ATTRIBUTES = ("capital", "river", "emblem", "harbour")
WORD_LIST = 1000


@dataclass(frozen=True)
class Family:
    """One kind of prompt; with `has_depth`, one fact is asked for, and it lies at a depth that is
    chosen."""

    title: str
    has_depth: bool
    write: Callable[[PromptWriter, float], TaskPrompt]


def _fact(name: str, code: str) -> str:
    return f"\nThe access code of {name} is {code}.\n"


def _ask(name: str, *codes: str) -> Question:
    return Question(f"\nQuestion: What is the access code of {name}?\nAnswer: ", codes)


def _single(writer: PromptWriter, depth: float) -> TaskPrompt:
    (name,), code = writer.names(1), writer.number(CODE_DIGITS)
    return writer.prompt([(depth, _fact(name, code))], [_ask(name, code)])


def _multi_key(writer: PromptWriter, depth: float) -> TaskPrompt:
    asked, *others = writer.names(1 + DISTRACTORS)
    code = writer.number(CODE_DIGITS)
    facts = [
        (at, _fact(name, writer.number(CODE_DIGITS)))
        for at, name in zip(writer.spread(DISTRACTORS), others, strict=True)
    ]
    return writer.prompt([*facts, (depth, _fact(asked, code))], [_ask(asked, code)])


def _multi_value(writer: PromptWriter, depth: float) -> TaskPrompt:
    (name,) = writer.names(1)
    codes = [writer.number(CODE_DIGITS) for _ in range(VALUES)]
    facts = [
        (at, f"\nOne of the access codes of {name} is {code}.\n")
        for at, code in zip(writer.spread(VALUES), codes, strict=True)
    ]
    text = (
        f"\nQuestion: What are the {VALUES} access codes of {name}, in the order of the text?"
        "\nAnswer: "
    )
    return writer.prompt(facts, [Question(text, tuple(codes))])


def _multi_query(writer: PromptWriter, depth: float) -> TaskPrompt:
    names = writer.names(2 * QUERIES)
    codes = {name: writer.number(CODE_DIGITS) for name in names}
    facts = [
        (at, _fact(name, codes[name]))
        for at, name in zip(writer.spread(len(names)), names, strict=True)
    ]
    return writer.prompt(
        facts, [_ask(name, codes[name]) for name in writer.rng.sample(names, QUERIES)]
    )


def _variables(writer: PromptWriter, depth: float) -> TaskPrompt:
    """Chains of assignments; the question asks for all variables of one chain."""
    names = [name.upper() for name in writer.names(CHAIN * CHAINS)]
    chains = [names[i * CHAIN : (i + 1) * CHAIN] for i in range(CHAINS)]
    values = [writer.number(5) for _ in chains]
    facts = []
    for chain, value in zip(chains, values, strict=True):
        given = [value, *(f"VAR {name}" for name in chain[:-1])]
        facts += [
            (at, f"\nVAR {name} = {what}.\n")
            for at, name, what in zip(writer.spread(CHAIN), chain, given, strict=True)
        ]
    text = (
        f"\nQuestion: Which {CHAIN} variables have the value {values[0]}, in the order of the text?"
        "\nAnswer: "
    )
    return writer.prompt(facts, [Question(text, tuple(chains[0]))])


def _common_words(writer: PromptWriter, depth: float) -> TaskPrompt:
    common = sorted(writer.names(COMMON))
    others = [
        name
        for name in writer.names(COMMON + (WORD_LIST - COMMON * COMMON_TIMES) // RARE_TIMES)
        if name not in common
    ]
    words = common * COMMON_TIMES + others * RARE_TIMES
    writer.rng.shuffle(words)
    text = (
        f"\nQuestion: What are the {COMMON} most common words of the list, in alphabetical order?"
        "\nAnswer: "
    )
    question = Question(text, tuple(common))
    return writer.prompt([(0.0, "A list of words:\n")], [question], fill=" ".join(words) + " ")


def _documents(writer: PromptWriter, depth: float) -> TaskPrompt:
    """Documents about invented places; the question asks for one attribute of one of them."""
    places = writer.names(1 + DISTRACTORS)
    pages, asked = [], ""
    what = writer.rng.choice(ATTRIBUTES)
    for at, place in zip([depth, *writer.spread(DISTRACTORS)], places, strict=True):
        named = dict(zip(ATTRIBUTES, writer.names(len(ATTRIBUTES)), strict=True))
        lines = " ".join(f"The {kind} of {place} is {name}." for kind, name in named.items())
        pages.append((at, f"\nDocument about {place}: {lines}\n"))
        asked = asked or named[what]
    text = f"\nQuestion: What is the {what} of {places[0]}?\nAnswer: "
    return writer.prompt(pages, [Question(text, (asked,))])


FAMILIES: Mapping[str, Family] = {
    "single": Family("one needle", True, _single),
    "multi-key": Family("one needle of eight", True, _multi_key),
    "multi-value": Family("all values of a key", False, _multi_value),
    "multi-query": Family("several needles", False, _multi_query),
    "variables": Family("variable tracking", False, _variables),
    "common-words": Family("most common words", False, _common_words),
    "documents": Family("a question about documents", True, _documents),
}
"""Every family by the name that commands take."""


@dataclass(frozen=True)
class Question:
    """Words in front of answers, the answers in the order in which they are expected, each scored
    as a whole, and what stands between two of them."""

    text: str
    answers: tuple[str, ...]
    joined: str = ", "


@dataclass
class PromptWriter:
    """Draws the pieces of one prompt after the other: the same `seed` gives the same prompts,
    whatever was drawn before. `filler` are token ids of ordinary text, and a prompt has `length`
    tokens, its questions and answers included."""

    filler: Sequence[int]
    encode: Encode
    length: int
    seed: str
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def names(self, count: int) -> list[str]:
        """Distinct invented names."""
        return invented_names(self.rng, count)

    def number(self, digits: int) -> str:
        """Random digits."""
        return "".join(self.rng.choices("0123456789", k=digits))

    def spread(self, count: int) -> list[float]:
        """Ascending random depths, one in each of `count` equal parts."""
        return [(i + self.rng.random()) / count for i in range(count)]

    def prompt(
        self, facts: Sequence[tuple[float, str]], questions: Sequence[Question], *, fill: str = ""
    ) -> TaskPrompt:
        """Facts at their depths in filler, then the questions with their answers; `fill` takes the
        place of the filler, as often as it takes."""
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
        return with_answers(body, tail[: stretches[-1][1]], stretches)

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
