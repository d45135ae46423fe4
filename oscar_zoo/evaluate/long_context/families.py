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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oscar_zoo.evaluate.long_context.writer import PromptWriter, Question
from oscar_zoo.evaluate.tasks.base import TaskPrompt

CODE_DIGITS = 6
DISTRACTORS, VALUES, QUERIES, CHAIN, CHAINS = 7, 4, 4, 4, 3
COMMON, COMMON_TIMES, RARE_TIMES = 3, 30, 3
"""Most common words to name; how often they and the others stand in a list of a thousand words."""
ATTRIBUTES = ("capital", "river", "emblem", "harbour")
WORD_LIST = 1000


@dataclass(frozen=True)
class Family:
    """One kind of prompt.

    Attributes:
        title: for people.
        has_depth: one fact is asked for, and it lies at a depth that is chosen.
        write: makes a prompt; the depth is ignored without `has_depth`.
    """

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
