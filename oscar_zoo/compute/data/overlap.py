"""Whether calibration text holds questions of an evaluation set.

Both are compared as words: case, punctuation and spacing do not count, and a character of a script
without spaces is a word. A question overlaps when 13 of its consecutive words occur in the
calibration text, or all of its words when it has fewer than 13. Questions of fewer than 6 words are
not compared, because they would be found anywhere.

Source: 13-grams are the measure of contamination of "Language Models are Few-Shot Learners",
appendix C.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from oscar_zoo.artifact.manifest import Disjoint
from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.compute.data.evaluation_sets import EvaluationSet, sets_on_this_machine
from oscar_zoo.errors import UsageError
from oscar_zoo.next_step import AddOption

NGRAM = 13
SHORTEST = 6
METHOD = "exact+13-gram/1"
"""Names this measure in manifests."""

_WORD = re.compile(r"[^\W_]+")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")  # Han and Kana


@dataclass(frozen=True)
class Overlap:
    """The part of an evaluation set that occurs in calibration text.

    Attributes:
        dataset: name of the set.
        items: questions it has.
        compared: of these, long enough to be compared.
        whole: of these, found from the first word to the last.
        partial: of these, sharing 13 words in a row, or found whole.
        example: number of the first overlapping question, from 1; `None` without one.
    """

    dataset: str
    items: int
    compared: int
    whole: int
    partial: int
    example: int | None

    @property
    def method(self) -> str:
        """How it was compared, for manifests."""
        return f"{METHOD}, {self.compared} of {self.items} items"


def words(text: str) -> list[str]:
    """Words of `text` in one spelling: compatibility forms and case folded, punctuation dropped."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(_UNSPACED.sub(r" \g<0> ", folded))


def measure_overlap(texts: Iterable[str], evaluation: EvaluationSet) -> Overlap:
    """Compare calibration texts with one evaluation set.

    Runs of equal words are looked for inside one text at a time.
    """
    items = [words(item) for item in evaluation.items]
    wanted: dict[int, dict[str, set[int]]] = {}
    for at, item in enumerate(items):
        if len(item) >= SHORTEST:
            length = min(NGRAM, len(item))
            for gram in _grams(item, length):
                wanted.setdefault(length, {}).setdefault(gram, set()).add(at)
    found: set[int] = set()
    whole: set[int] = set()
    for text in texts:
        stream = words(text)
        here = {
            at
            for length, grams in wanted.items()
            for gram in _grams(stream, length)
            for at in grams.get(gram, ())
        }
        spaced = f" {' '.join(stream)} "
        whole |= {at for at in here if f" {' '.join(items[at])} " in spaced}
        found |= here
    return Overlap(
        evaluation.name,
        items=len(items),
        compared=sum(len(item) >= SHORTEST for item in items),
        whole=len(whole),
        partial=len(found),
        example=min(found) + 1 if found else None,
    )


def check_overlap(
    data: CalibrationData,
    sets: Sequence[EvaluationSet] | None = None,
    *,
    allow_overlap: bool = False,
) -> CalibrationData:
    """Compare calibration and held-out text with evaluation sets and record the result in `data`.

    Args:
        sets: to compare with; `None` for every known set that is on this machine.

    Returns:
        `data` with `disjoint_from`, `overlaps_with` and notes.
    """
    sets = sets_on_this_machine() if sets is None else sets
    results = [measure_overlap(data.texts, evaluation) for evaluation in sets]
    overlapping = [result for result in results if result.partial]
    for result in overlapping:
        if not allow_overlap and result.dataset not in data.overlaps_with:
            raise UsageError(
                f"{_sentence(data.source, result)}.",
                hint="use other text",
                next_step=AddOption("--allow-overlap"),
            )
    apart = [result for result in results if result.compared and not result.partial]
    known = tuple(
        Disjoint(dataset=r.dataset, method=r.method)
        for r in apart
        if r.dataset not in data.overlaps_with
    )
    names = dict.fromkeys([*data.overlaps_with, *(result.dataset for result in overlapping)])
    return replace(
        data,
        disjoint_from=known if results else None,
        overlaps_with=tuple(names),
        notes=(
            *data.notes,
            *(f"{_sentence(data.source, r)}: scores on it say nothing." for r in overlapping),
        ),
    )


def _sentence(source: str, result: Overlap) -> str:
    return (
        f"{source} holds {result.partial} of {result.items} questions of {result.dataset}"
        f" ({result.whole} whole, the others by {NGRAM} words in a row; the first is number"
        f" {result.example})"
    )


def _grams(stream: Sequence[str], length: int) -> Iterable[str]:
    return (" ".join(stream[at : at + length]) for at in range(len(stream) - length + 1))
