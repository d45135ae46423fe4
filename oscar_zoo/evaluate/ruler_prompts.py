"""The families of RULER (Hsieh et al., arXiv 2404.06654, section 3), as prompts whose answers can
be checked without generating text.

Two things differ from RULER. Answers are expected in an order that the question names, so that the
prediction of every token of an answer can be compared with the true one, given the true tokens
before it. And documents are invented ones, so that no data has to be fetched and no model knows the
answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.measure import TaskPrompt
from oscar_zoo.evaluate.params import Family
from oscar_zoo.evaluate.questions import (
    Encode,
    Recall,
    encode_answers,
    invented_names,
    random_digits,
    with_answers,
)

CODE_DIGITS = 6
DISTRACTORS, VALUES, QUERIES, CHAIN, CHAINS = 7, 4, 4, 4, 3
COMMON, COMMON_TIMES, RARE_TIMES = 3, 30, 3
"""Most common words to name; how often they and the others stand in a list of a thousand words."""
ATTRIBUTES = ("capital", "river", "emblem", "harbour")
WORD_LIST = 1000
Place = tuple[Family, int, float | None]
"""Family, tokens of a prompt, and the depth of the fact that is asked for, 0 to 1, or `None` where
facts lie everywhere."""
Question = tuple[str, tuple[str, ...]]
"""Words in front of answers, and the answers in their order, each scored as a whole."""


class Kind(NamedTuple):
    """One kind of prompt; with `has_depth`, one fact is asked for, and it lies at a depth that is
    chosen."""

    title: str
    has_depth: bool
    write: Callable[[PromptWriter, float], TaskPrompt]


def _fact(name: str, code: str) -> str:
    return f"\nThe access code of {name} is {code}.\n"


def _asked(question: str, *answers: str) -> Question:
    return f"\nQuestion: {question}\nAnswer: ", answers


def _ask(name: str, code: str) -> Question:
    return _asked(f"What is the access code of {name}?", code)


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
    question = f"What are the {VALUES} access codes of {name}, in the order of the text?"
    return writer.prompt(facts, [_asked(question, *codes)])


def _multi_query(writer: PromptWriter, depth: float) -> TaskPrompt:
    names = writer.names(2 * QUERIES)
    codes = {name: writer.number(CODE_DIGITS) for name in names}
    pairs = zip(writer.spread(len(names)), codes.items(), strict=True)
    facts = [(at, _fact(*one)) for at, one in pairs]
    asked = writer.rng.sample(names, QUERIES)
    return writer.prompt(facts, [_ask(name, codes[name]) for name in asked])


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
    question = f"Which {CHAIN} variables have the value {values[0]}, in the order of the text?"
    return writer.prompt(facts, [_asked(question, *chains[0])])


def _common_words(writer: PromptWriter, depth: float) -> TaskPrompt:
    common = sorted(writer.names(COMMON))
    every = writer.names(COMMON + (WORD_LIST - COMMON * COMMON_TIMES) // RARE_TIMES)
    words = common * COMMON_TIMES + [name for name in every if name not in common] * RARE_TIMES
    writer.rng.shuffle(words)
    text = f"What are the {COMMON} most common words of the list, in alphabetical order?"
    question, head = _asked(text, *common), (0.0, "A list of words:\n")
    return writer.prompt([head], [question], fill=" ".join(words) + " ")


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
    return writer.prompt(pages, [_asked(f"What is the {what} of {places[0]}?", asked)])


FAMILIES: Mapping[str, Kind] = {
    "single": Kind("one needle", True, _single),
    "multi-key": Kind("one needle of eight", True, _multi_key),
    "multi-value": Kind("all values of a key", False, _multi_value),
    "multi-query": Kind("several needles", False, _multi_query),
    "variables": Kind("variable tracking", False, _variables),
    "common-words": Kind("most common words", False, _common_words),
    "documents": Kind("a question about documents", True, _documents),
}


class PromptWriter:
    """Draws the pieces of one prompt after the other: the same `seed` gives the same prompts,
    whatever was drawn before. `filler` are token ids of ordinary text, and a prompt has `length`
    tokens, its questions and answers included."""

    def __init__(self, filler: Sequence[int], encode: Encode, length: int, seed: str) -> None:
        self._filler, self._encode, self._length = filler, encode, length
        self.rng = random.Random(seed)

    def names(self, count: int) -> list[str]:
        return invented_names(self.rng, count)

    def number(self, digits: int) -> str:
        return random_digits(self.rng, digits)

    def spread(self, count: int) -> list[float]:
        """Ascending random depths, one in each of `count` equal parts."""
        return [(i + self.rng.random()) / count for i in range(count)]

    def prompt(
        self, facts: Sequence[tuple[float, str]], questions: Sequence[Question], *, fill: str = ""
    ) -> TaskPrompt:
        """Facts at their depths in filler, then the questions with their answers; `fill` takes the
        place of the filler, as often as it takes."""
        words: list[tuple[str, bool]] = []
        for text, answers in questions:
            words.append((text, False))
            for answer in answers:
                words += [(answer, True), (", ", False)]
            words[-1] = ("\n", False)
        tail, stretches = encode_answers(self._encode, words)
        pieces = sorted(((depth, self._encode(text)) for depth, text in facts), key=lambda f: f[0])
        room = self._length - len(tail) - sum(len(ids) for _, ids in pieces)
        if room < 0:
            raise UsageError(
                f"{self._length} tokens have no room for the facts and the questions, which take"
                f" {self._length - room}.",
                hint="use longer prompts",
            )
        filler = self._text(room, fill)
        for depth, ids in reversed(pieces):
            cut = round(depth * room)
            filler[cut:cut] = ids
        return with_answers(filler, tail[: stretches[-1][1]], stretches)

    def _text(self, count: int, fill: str) -> list[int]:
        if fill:
            once = self._encode(fill)
            return (once * (count // len(once) + 1))[:count]
        if count > len(self._filler):
            raise UsageError(
                f"the text has {len(self._filler):,} tokens, and a prompt needs {count:,} of them.",
                hint="give a longer text with --data",
            )
        start = self.rng.randrange(len(self._filler) - count + 1)
        return list(self._filler[start : start + count])


def places_of(families: Sequence[Family], lengths: Sequence[int], depths: int) -> tuple[Place, ...]:
    """Every place, shortest prompts first; `depths` are spread evenly from 0 to 1, and 1 means the
    middle."""
    spread = [0.5] if depths == 1 else [round(i / (depths - 1), 4) for i in range(depths)]
    return tuple(
        (name, length, depth)
        for length in sorted(set(lengths))
        for name in dict.fromkeys(families)
        for depth in (spread if FAMILIES[name].has_depth else [None])
    )


def write_prompts(
    places: Sequence[Place],
    filler: Sequence[int],
    encode: Encode,
    *,
    samples: int,
    depths: int,
    seed: int,
) -> dict[Place, Recall]:
    """The prompts of every place: `samples` where facts have a depth, and as many as all depths
    together where they lie everywhere."""
    found = {}
    for family, length, depth in places:
        prompts = []
        for number in range(samples if depth is not None else samples * depths):
            drawn = f"{seed} {family} {length} {depth} {number}"
            writer = PromptWriter(filler, encode, length, drawn)
            prompts.append(FAMILIES[family].write(writer, depth or 0.0))
        found[family, length, depth] = Recall(tuple(prompts), seed)
    return found
