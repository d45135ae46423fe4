"""All that is known about the scores of artifacts."""

from __future__ import annotations

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
        Measured | None, says("As its hub said when it was pulled, where a copy is in the store.")
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
        found = describe_folder(target)
    else:
        with looking_up(target, SILENT):
            found = describe(target, Sources(params.hubs, offline=params.offline))
    for error in () if found.scores else found.unreachable:
        observer.note(Note("hub.unreachable", error.message))
    made = {manifest.id: known.Measured.of(manifest) for manifest in found.artifacts}
    records = {str(record.id): record for record in found.records}
    artifacts = []
    for name, published in found.scores.items():
        artifact, record = ArtifactId.parse(name), records.get(name)
        place, path = artifact.reference, score_file.in_state(artifact)
        own: tuple[Score, ...] = ()
        warnings = status_warnings(record) if record else ()
        if isinstance(target, PathTarget):
            place, path = path_text(target.path), score_file.in_folder(target.path)
            warnings = found.warnings
        elif (file := score_file.read(path)) is not None:
            said = {key(score): score.value for score in published}
            own = tuple(one for one in file.scores if said.get(key(one)) != one.value)
        at_pull = record.measured if record else None
        told = (made.get(name), at_pull, published, own, path, warnings)
        artifacts.append(KnownScores(name, place, *told))
    return ScoresReport(tuple(artifacts))


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
