"""Scores of artifacts: attach those of a score file, and show all that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.browse import Description, describe
from oscar_zoo.app.folder_description import describe_folder
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.specs import Score
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import score_file
from oscar_zoo.registry import status as registry
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.score_file import key
from oscar_zoo.registry.status import AttachResult
from oscar_zoo.registry.targets import PathTarget, looking_up, parse
from oscar_zoo.registry.writing import WriteReport, Written, ignore, writable_hubs, write_to_each


@dataclass(frozen=True)
class AddScoresRequest:
    """Which scores get to which version, and where.

    Attributes:
        name: exactly one version: `NAME:TAG`, an alias of one, or `[NAME@]sha256:PREFIX`.
        file: the score file.
        hubs: where, in order, as people write hubs; without any, see `writing.writable_hubs`.
        propose: open a pull request instead of committing.
    """

    name: str
    file: Path
    hubs: tuple[str, ...] = ()
    propose: bool = False


@dataclass(frozen=True)
class KnownScores:
    """What is known about the quality of one artifact.

    Attributes:
        id: `<Model>/<tag>`.
        place: what commands call it: its name, or its folder where that was named.
        made: perplexity and recall when it was made, by its manifest; `None` where nobody measured.
        at_pull: the same as its hub said when it was pulled; `None` without a copy in the store.
        scores: of the indexes of hubs and of this package, or beside it in a folder: measured ones
            first, upstream's last.
        own: measured on this machine, and on no hub that was asked.
        own_path: the score file of `own`.
        warnings: sentences about a copy that was yanked or deprecated, or is poor or damaged.
    """

    id: str
    place: str
    made: Measured | None
    at_pull: Measured | None
    scores: tuple[Score, ...]
    own: tuple[Score, ...]
    own_path: Path
    warnings: tuple[str, ...]


def known_scores(
    name: str | Path, sources: Sources, observer: Observer = SILENT
) -> tuple[KnownScores, ...]:
    """What is known about the quality of a model's artifacts, of the one that is named, or of the
    one in a folder, by id. No hub is asked about a folder.

    Where nothing is known, the observer is told which hubs did not answer.
    """
    target = parse(name)
    if isinstance(target, PathTarget):
        return _in_folder(target, describe_folder(target))
    with looking_up(target, SILENT):
        found = describe(target, sources)
    for error in () if found.scores else found.unreachable:
        observer.note(Note("hub.unreachable", error.message))
    made = {manifest.id: Measured.of(manifest) for manifest in found.manifests}
    copies = {str(copy.record.id): copy.record for copy in found.installed}
    known = []
    for artifact, scores in found.scores.items():
        one, record = ArtifactId.parse(artifact), copies.get(artifact)
        own, path = _own(one, scores)
        known.append(
            KnownScores(
                id=artifact,
                place=one.reference,
                made=made.get(artifact),
                at_pull=None if record is None else record.measured,
                scores=scores,
                own=own,
                own_path=path,
                warnings=() if record is None else status_warnings(record),
            )
        )
    return tuple(known)


def _in_folder(target: PathTarget, found: Description) -> tuple[KnownScores, ...]:
    (manifest,) = found.manifests
    return (
        KnownScores(
            id=manifest.id,
            place=path_text(target.path),
            made=Measured.of(manifest),
            at_pull=None,
            scores=found.scores[manifest.id],
            own=(),
            own_path=score_file.in_folder(target.path),
            warnings=found.warnings,
        ),
    )


def _own(artifact: ArtifactId, published: Sequence[Score]) -> tuple[tuple[Score, ...], Path]:
    """Scores of the state folder that are not published as they are, and their file."""
    path = score_file.in_state(artifact)
    file = score_file.read(path)
    known = {key(score): score.value for score in published}
    own = [s for s in (file.scores if file else ()) if known.get(key(s)) != s.value]
    return tuple(own), path


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
    return known_scores(name, Sources((hub,) if hub else ()))


def add_all(
    request: AddScoresRequest,
    observer: Observer = SILENT,
    told: Callable[[Written[AttachResult]], None] = ignore,
) -> WriteReport[AttachResult]:
    """Attach the scores of a file on one hub after the other."""
    file, what = score_file.load(request.file), path_text(request.file)

    def write(hub: Hub) -> AttachResult:
        return registry.attach_scores(hub, request.name, file, what=what, propose=request.propose)

    return write_to_each(writable_hubs(request.hubs), write, "Writing to", observer, told)


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
    request = AddScoresRequest(name, Path(file), (hub,) if hub else (), propose=propose)
    return add_all(request).done[0].result
