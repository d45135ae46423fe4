"""Scores of artifacts: what makes two of them claims about the same thing, what a measured one has
to say, how they are added, and the score file `oscar-zoo.scores/1`.

A measured score is believed because somebody else can repeat it. So it names the questions, the
runs, the tools, the settings and the bytes, and its standard error follows from the rest. Nothing
that was claimed once is lost: what was measured with the most tokens or answers stands, else the
latest value, and the other goes to its history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo import paths
from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.specs import Digest, Document, HistoryEntry, Score, Text
from oscar_zoo.errors import DigestMismatchError, PathNotFound, UsageError

PERPLEXITY, RECALL = "perplexity", "recall"
FORCED: Final = (PERPLEXITY, RECALL)
"""Tasks whose answers are teacher-forced: nothing is generated, so nothing is sampled or cut."""

_ALWAYS: Final = "value dataset_revision stderr n repeats seeds harness engine date".split()
_OF_GENERATED: Final = ("sampling", "generation_cap", "exhausted_rate")
RIGHT_OR_WRONG: Final = ("accuracy", "exact_match", "pass@1")
"""Metrics that average answers of which each is right or wrong."""
_ROUNDING: Final = 0.005
"""Half of the last digit of an error given with two decimals, in points."""

Key = tuple[str, str, str, tuple[tuple[str, str], ...], str, str | None]


def key(score: Score) -> Key:
    changes = tuple(sorted(score.recipe_changes.items()))
    return score.task, score.metric, score.kv_dtype, changes, score.reporter, score.who


def values(score: Score) -> tuple[float | None, ...]:
    return score.value, *(entry.value for entry in score.history)


def is_lower_better(score: Score) -> bool:
    return score.unit == "perplexity"


def is_of_recipe(score: Score) -> bool:
    """Whether a score is a value of INT2 under the recipe of its artifact, and so speaks for it."""
    return score.value is not None and score.kv_dtype == "int2" and not score.recipe_changes


def value_text(score: Score | None) -> str | None:
    if score is None or score.value is None:
        return None
    return f"{score.value:.2f}" + ("" if score.stderr is None else f" ± {score.stderr:.2f}")


def both_text(score: Score, *, error: bool = False) -> str:
    base = score.baseline.value if score.baseline else None
    after = value_text(score) if error else f"{score.value:.2f}"
    return f"{'?' if base is None else f'{base:.2f}'} → {after}"


def faults(score: Score, digest: str) -> tuple[str, ...]:
    """What is wrong with a score as a record of the artifact `digest`, each as a clause that begins
    with the task."""
    found = [*_faults(score, digest if score.kv_dtype == "int2" else None)]
    base = score.baseline
    if base is None and score.paired is not None:
        found.append("it is paired with a baseline that is not there")
    if base is not None:
        found += [f"its baseline: {fault}" for fault in _faults(base, None)]
        if (base.task, base.metric, base.unit) != (score.task, score.metric, score.unit):
            found.append("its baseline measures something else")
        if base.kv_dtype != "bf16":
            found.append(f"its baseline has a cache of {base.kv_dtype}, not bf16")
        if base.baseline is not None or base.paired is not None:
            found.append("its baseline has a baseline")
    return tuple(f"{score.task} ({score.kv_dtype}): {fault}" for fault in found)


def binomial_error(percent: float, answers: int) -> float:
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / answers)


def _faults(score: Score, digest: str | None) -> Iterator[str]:
    if score.artifact_digest not in (None, digest) and digest is not None:
        yield f"it was measured with {score.artifact_digest}"
    if score.reporter == "measured":
        needed = [*_ALWAYS, *(() if score.task in FORCED else _OF_GENERATED)]
        needed += [] if digest is None else ["artifact_digest"]
        if score.task in FORCED and score.n == 1:  # one text has no spread
            needed.remove("stderr")
        missing = [name for name in needed if getattr(score, name) is None]
        if missing:
            yield f"a measured score needs {', '.join(missing)}"
    for name in ("seeds", "values"):
        given = getattr(score, name)
        if given is not None and score.repeats is not None and len(given) != score.repeats:
            yield f"it has {len(given)} {name} of {score.repeats} repeats"
    yield from _error_faults(score)


def _error_faults(score: Score) -> Iterator[str]:
    """A standard error that cannot come from the value: answers to one question need not be
    independent, so it lies between that of `n * repeats` independent answers and that of `n`."""
    value, error, n = score.value, score.stderr, score.n
    if error is not None and error < 0:
        yield f"its standard error is {error:g}"
    elif score.unit == "percent" and value is not None and not 0 <= value <= 100:
        yield f"its value is {value:g} percent"
    elif score.unit == "percent" and value is not None and error is not None and n is not None:
        least = binomial_error(value, n * (score.repeats or 1))
        most = binomial_error(value, max(n - 1, 1))
        fits = 0.99 * least - _ROUNDING <= error <= 1.01 * most + _ROUNDING
        if score.metric in RIGHT_OR_WRONG and not fits:
            yield (
                f"its standard error is {error:.3g} points, but {n} questions of which {value:.4g}"
                f" percent are right give {least:.3g} to {most:.3g}"
            )


_REPORTERS = {"measured": 0, "third_party": 1, "upstream": 2}


def merged(there: Sequence[Score], more: Iterable[Score]) -> tuple[Score, ...]:
    """`there` with `more` added, as `in_order` has them; `there` itself where nothing is new."""
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
    same = _claims(before) == _claims(score)
    stays = same or _asked(before, score) > _asked(score, before)
    ended = before.history if stays else before.history + _entry(before)
    new = score.history + (_entry(score) if stays and not same else ())
    ended += tuple(entry for entry in new if entry not in ended)
    return (before if stays else score).model_copy(update={"history": ended})


def _asked(score: Score, other: Score) -> int:
    """Tokens or answers of a measurement of the same bytes in the same engine as `other`."""
    same = [(one.artifact_digest, one.engine and one.engine.name) for one in (score, other)]
    if score.reporter != "measured" or same[0] != same[1]:
        return 0
    if score.task in FORCED:
        return score.tokens.prompt if score.tokens else 0
    return (score.n or 0) * (score.repeats or 1)


def _entry(score: Score) -> tuple[HistoryEntry, ...]:
    value, source = score.value, _source(score)
    return () if value is None else (HistoryEntry(value=value, source=source, date=score.date),)


def _claims(score: Score) -> Score:
    """A score without what a rerun changes; its command may have options of another task."""
    blank = {"date": None, "history": ()} | ({"source": None} if score.harness else {})
    base = score.baseline
    return score.model_copy(update=blank | {"baseline": base and base.model_copy(update=blank)})


def _source(score: Score) -> str:
    """Where a value came from, with what tells how sure it was."""
    tool = score.harness and " ".join(filter(None, (score.harness.name, score.harness.version)))
    facts = [
        score.source or tool or score.who or score.reporter,
        f"± {score.stderr:.3g}" if score.stderr is not None else None,
        f"n {score.n}" if score.n is not None else None,
        f"{score.repeats} runs" if score.repeats is not None else None,
        f"data {score.dataset_revision[:19]}" if score.dataset_revision is not None else None,
    ]
    return "; ".join(fact for fact in facts if fact is not None)


SCHEMA: Final = "oscar-zoo.scores/1"
FILE_NAME: Final = "scores.json"
"""Name of the file beside the `oscar.json` of an artifact folder."""


class ScoreFile(Document):
    """Scores of one artifact, at most one about the same thing by the same reporter; those of an
    INT2 cache carry their BF16 baseline."""

    NAME, CODE = FILE_NAME, "scores"
    REMEDY = "measure again with `oscar-zoo eval`, or fetch it again"
    NEWER = "a score file is what oscar-zoo eval writes"
    schema_: Literal["oscar-zoo.scores/1"] = Field(alias="schema")
    artifact: Text
    digest: Digest
    scores: Annotated[tuple[Score, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ArtifactId.parse(self.artifact)
        seen = set()
        for score in self.scores:
            if key(score) in seen:
                raise ValueError(f"{score.task} ({score.kv_dtype}) is there twice")
            seen.add(key(score))
            for fault in faults(score, self.digest):
                raise ValueError(fault)
        return self

    @classmethod
    def of(cls, artifact: ArtifactId, digest: str, scores: tuple[Score, ...]) -> Self:
        return cls(schema=SCHEMA, artifact=str(artifact), digest=digest, scores=scores)

    @property
    def artifact_id(self) -> ArtifactId:
        return ArtifactId.parse(self.artifact)

    def check_same(self, artifact: ArtifactId, digest: str, *, what: str, where: str) -> None:
        """Refuse to be attached to another artifact than this one; `what` is the file's name."""
        if self.artifact_id.key != artifact.key:
            own = self.artifact_id.reference
            raise UsageError(
                f"{what} has scores of {own}, not of {artifact.reference}.",
                hint=f"name the artifact that was measured: {own}",
            )
        if self.digest != digest:
            raise DigestMismatchError.for_content(
                f"{artifact} in {where}",
                want=f"{self.digest} by {what}",
                got=digest,
                hint=f"measure these bytes: oscar-zoo eval {artifact.reference}",
            )


def in_folder(folder: Path) -> Path:
    return folder / FILE_NAME


def in_state(artifact: ArtifactId) -> Path:
    return paths.state_dir() / "scores" / artifact.model / f"{artifact.tag}.json"


def load(path: Path) -> ScoreFile:
    if not path.exists():
        raise PathNotFound.for_path(path_text(path), "score file")
    data = read_file(path, max_bytes=strict_json.MAX_BYTES)
    return ScoreFile.from_bytes(data, what=path_text(path))


def read(path: Path) -> ScoreFile | None:
    """As `load`, and `None` where there is none."""
    return load(path) if path.exists() else None


def keep(path: Path, new: ScoreFile) -> ScoreFile:
    """Add the scores of `new` to the file at `path`, in one step; scores of other bytes, from
    before the artifact was made anew, are dropped."""
    with durable.storage_errors(f"cannot write {path}"):
        durable.make_folders(path.parent)
        with durable.held(str(path), timeout=30):
            there = read(path)
            same = there is not None and (there.digest, there.artifact) == (
                new.digest,
                new.artifact,
            )
            scores = merged(there.scores if there and same else (), new.scores)
            kept = ScoreFile.of(new.artifact_id, new.digest, scores)
            durable.replace_file(path, kept.to_bytes())
    return kept
