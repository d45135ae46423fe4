"""Adding scores to those that an artifact has: nothing that was claimed once is ever lost.

A score with the key of one that is there, and another value, takes its place; the earlier value
goes to the end of its history, with the date and the source it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oscar_zoo.artifact.specs import HistoryEntry, Score
from oscar_zoo.registry.score_rules import key

_REPORTERS = {"measured": 0, "third_party": 1, "upstream": 2}


def merged(there: Sequence[Score], more: Iterable[Score]) -> tuple[Score, ...]:
    """`there` with `more` added, in the order of `in_order`; `there` itself where nothing is
    new."""
    found = {key(score): score for score in there}
    for score in more:
        before = found.get(key(score))
        found[key(score)] = score if before is None else _after(before, score)
    same = tuple(found.values()) == tuple(there)
    return tuple(there) if same else in_order(found.values())


def in_order(scores: Iterable[Score]) -> tuple[Score, ...]:
    """What was measured first, then what others say, upstream last; otherwise as they came."""
    return tuple(sorted(scores, key=lambda score: _REPORTERS[score.reporter]))


def joined(first: Sequence[Score], second: Iterable[Score]) -> tuple[Score, ...]:
    """The scores of two sources, in the order of `in_order`: of claims with one key, the first."""
    known = {key(score) for score in first}
    return in_order((*first, *(score for score in second if key(score) not in known)))


def _after(before: Score, score: Score) -> Score:
    """`score`, which was claimed after `before`."""
    ended = (*before.history, *_as_history(before))
    if _claims(before) == _claims(score):
        return before
    new = [entry for entry in score.history if entry not in ended]
    return score.model_copy(update={"history": (*ended, *new)})


def _claims(score: Score) -> Score:
    """A score without what a rerun changes."""
    blank = {"date": None, "history": ()}
    base = score.baseline
    return score.model_copy(update=blank | {"baseline": base and base.model_copy(update=blank)})


def _as_history(score: Score) -> tuple[HistoryEntry, ...]:
    if score.value is None:
        return ()
    return (HistoryEntry(value=score.value, source=_source(score), date=score.date),)


def _source(score: Score) -> str:
    """Where a value came from, with what tells how sure it was."""
    tool = score.harness and " ".join(filter(None, (score.harness.name, score.harness.version)))
    said = score.source or tool or score.who or score.reporter
    facts = [
        f"± {score.stderr:.3g}" if score.stderr is not None else None,
        f"n {score.n}" if score.n is not None else None,
        f"{score.repeats} runs" if score.repeats is not None else None,
        f"data {score.dataset_revision[:19]}" if score.dataset_revision is not None else None,
    ]
    return "; ".join([said, *(fact for fact in facts if fact is not None)])
