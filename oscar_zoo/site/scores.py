"""All that is known about the scores of artifacts."""

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
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.score_file import key
from oscar_zoo.registry.store import Record
from oscar_zoo.registry.targets import PathTarget, looking_up, parse
from oscar_zoo.site.facts import Measured, Score
from oscar_zoo.site.info import describe, describe_folder
from oscar_zoo.site.params import ScoresParams


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
