"""Scores of artifacts: attach those of a score file, and show all that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.outcome import HIDDEN, says
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import measured as known
from oscar_zoo.registry import score_file
from oscar_zoo.registry import status as registry
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.score_file import key
from oscar_zoo.registry.status import AttachResult
from oscar_zoo.registry.store import Record
from oscar_zoo.registry.targets import PathTarget, looking_up, parse
from oscar_zoo.registry.writing import WriteReport
from oscar_zoo.site.facts import Failure, Measured, Score, Written
from oscar_zoo.site.info import describe, describe_folder
from oscar_zoo.site.params import AddScoresParams, ScoresParams
from oscar_zoo.site.status import to_each


@dataclass(frozen=True)
class KnownScores:
    """What is known about the quality of one artifact."""

    id: Annotated[str, says("MODEL/TAG.")]
    place: Annotated[str, *HIDDEN]
    """What commands call it: its name, or its folder where that was named."""
    made: Annotated[Measured | None, says("As it was measured when the artifact was made.")]
    at_pull: Annotated[
        Measured | None,
        says("As its hub said when it was pulled, where a copy is in the store."),
    ]
    scores: Annotated[
        tuple[Score, ...],
        says("What was measured comes first, then what others and upstream report."),
    ]
    own: Annotated[
        tuple[Score, ...],
        says("Measured on this machine and on no hub.", serialization_alias="not_published"),
    ]
    own_path: Annotated[Path, *HIDDEN]
    """The score file of `own`."""
    warnings: Annotated[
        tuple[str, ...],
        says("Sentences about a copy that was yanked or deprecated, or is poor or damaged."),
    ]


@dataclass(frozen=True)
class ScoresReport:
    """What oscar-zoo scores NAME prints: all that is known about the quality of artifacts."""

    artifacts: tuple[KnownScores, ...]
    schema: Literal["oscar-zoo.scores-of/1"] = "oscar-zoo.scores-of/1"


def run(params: ScoresParams, observer: Observer = SILENT) -> ScoresReport:
    """What is known about the quality of a model's artifacts, of the one that is named, or of the
    one in a folder, by id. No hub is asked about a folder.

    Where nothing is known, the observer is told which hubs did not answer.
    """
    target = parse(params.name)
    if isinstance(target, PathTarget):
        return ScoresReport((_in_folder(target),))
    with looking_up(target, SILENT):
        found = describe(target, Sources(params.hubs, offline=params.offline))
    for error in () if found.scores else found.unreachable:
        observer.note(Note("hub.unreachable", error.message))
    made = {manifest.id: known.Measured.of(manifest) for manifest in found.artifacts}
    records = {str(record.id): record for record in found.records}
    return ScoresReport(
        tuple(
            _known(ArtifactId.parse(name), scores, made.get(name), records.get(name))
            for name, scores in found.scores.items()
        )
    )


def scores(name: str | Path, *, hub: str | None = None) -> tuple[KnownScores, ...]:
    """What is known about the quality of a model's artifacts, or of the one that is named.

    Args:
        name: `NAME`, `NAME:TAG`, `<Model>/<tag>`, `NAME@sha256:PREFIX`, or the folder of an
            artifact.
        hub: where to look; default the configured hubs.

    Raises:
        ArtifactNotFound: nothing known has this name.
        PathNotFound: there is no such folder, or it has no `oscar.json`.
    """
    return run(ScoresParams(name, hubs=hub)).artifacts


def _in_folder(target: PathTarget) -> KnownScores:
    found = describe_folder(target)
    (manifest,) = found.artifacts
    return KnownScores(
        id=manifest.id,
        place=path_text(target.path),
        made=known.Measured.of(manifest),
        at_pull=None,
        scores=found.scores[manifest.id],
        own=(),
        own_path=score_file.in_folder(target.path),
        warnings=found.warnings,
    )


def _known(
    artifact: ArtifactId,
    published: tuple[Score, ...],
    made: Measured | None,
    record: Record | None,
) -> KnownScores:
    own, path = _own(artifact, published)
    return KnownScores(
        id=str(artifact),
        place=artifact.reference,
        made=made,
        at_pull=None if record is None else record.measured,
        scores=published,
        own=own,
        own_path=path,
        warnings=() if record is None else status_warnings(record),
    )


def _own(artifact: ArtifactId, published: Sequence[Score]) -> tuple[tuple[Score, ...], Path]:
    """Scores of the state folder that are not published as they are, and their file."""
    path = score_file.in_state(artifact)
    file = score_file.read(path)
    known = {key(score): score.value for score in published}
    own = [s for s in (file.scores if file else ()) if known.get(key(s)) != s.value]
    return tuple(own), path


@dataclass(frozen=True, kw_only=True)
class ScoredVersion(Written):
    """A version of which one hub took scores."""

    scores: Annotated[
        tuple[Score, ...],
        says("All that the version has now, or will have once the proposal is merged."),
    ]


@dataclass(frozen=True)
class AddedScores:
    """What oscar-zoo scores add prints."""

    hubs: Annotated[
        tuple[ScoredVersion, ...],
        says("In the order in which they were written; those after a failure are missing."),
    ]
    error: Failure = None
    schema: Literal["oscar-zoo.scores-added/1"] = "oscar-zoo.scores-added/1"


def add(params: AddScoresParams, observer: Observer = SILENT) -> AddedScores:
    """Attach the scores of a file on one hub after the other."""
    report = _added(params, observer)
    hubs = [ScoredVersion(hub=one.hub, **vars(one.result)) for one in report.done]
    return AddedScores(tuple(hubs), report.error)


def _added(params: AddScoresParams, observer: Observer) -> WriteReport[AttachResult]:
    file, what = score_file.load(params.file), path_text(params.file)

    def write(hub: Hub) -> AttachResult:
        name, propose = params.name, params.create_pr
        return registry.attach_scores(hub, name, file, what=what, propose=propose)

    return to_each(params, write, observer)


def add_scores(
    name: str, file: str | Path, *, hub: str | None = None, propose: bool = False
) -> AttachResult:
    """Attach the scores of a score file to exactly one published version, `NAME:TAG`.

    Its digest and its `oscar.json` stay. A value that is there already goes to the history of the
    new one.

    Args:
        name: the version; its digest must be that of the file.
        file: a score file, as `eval` writes it.
        hub: where; default the zoo of this user.
        propose: open a pull request instead.

    Raises:
        MalformedFile: the file is no score file.
        DigestMismatchError: the file is about other bytes.
        ArtifactNotFound: the hub has no such version.
    """
    hubs = (hub,) if hub else ()
    params = AddScoresParams(name, Path(file), hubs=hubs, create_pr=propose)
    return _added(params, SILENT).done[0].result
