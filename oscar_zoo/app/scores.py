"""Scores of artifacts: attach those of a score file, and show all that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.browse import describe
from oscar_zoo.app.progress import SILENT, Observer
from oscar_zoo.app.sources import Sources
from oscar_zoo.app.targets import parse_name
from oscar_zoo.app.writing import WriteReport, Written, ignore, writable_hubs, write_to_each
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.specs import Score
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry import attach_scores as registry
from oscar_zoo.registry import own_scores
from oscar_zoo.registry.attach_scores import AttachResult
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.score_rules import key


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
        made: perplexity and recall when it was made, by its manifest; `None` where nobody measured.
        scores: of the indexes of hubs and of this package: measured ones first, upstream's last.
        own: measured on this machine, and on no hub that was asked.
        own_path: the score file of `own`.
    """

    id: str
    made: Measured | None
    scores: tuple[Score, ...]
    own: tuple[Score, ...]
    own_path: Path


def known_scores(name: str, sources: Sources) -> tuple[KnownScores, ...]:
    """What is known about the quality of a model's artifacts, or of the one that is named, by id.

    Raises:
        ArtifactNotFound: nothing known has this name.
        OscarZooError: the only hub did not answer; see `registry.hub_queries.look`.
    """
    found = describe(parse_name(name), sources)
    made = {manifest.id: Measured.of(manifest) for manifest in found.manifests}
    return tuple(
        KnownScores(artifact, made.get(artifact), scores, *_own(ArtifactId.parse(artifact), scores))
        for artifact, scores in found.scores.items()
    )


def _own(artifact: ArtifactId, published: Sequence[Score]) -> tuple[tuple[Score, ...], Path]:
    """Scores of the state folder that are not published as they are, and their file."""
    path = own_scores.in_state(artifact)
    file = own_scores.read(path)
    known = {key(score): score.value for score in published}
    own = [s for s in (file.scores if file else ()) if known.get(key(s)) != s.value]
    return tuple(own), path


def scores(name: str, *, hub: str | None = None) -> tuple[KnownScores, ...]:
    """What is known about the quality of a model's artifacts, or of the one that is named.

    Args:
        name: `NAME`, `NAME:TAG`, `<Model>/<tag>` or `NAME@sha256:PREFIX`.
        hub: where to look; default the configured hubs.

    Raises:
        ArtifactNotFound: nothing known has this name.
    """
    return known_scores(name, Sources((hub,) if hub else ()))


def add_all(
    request: AddScoresRequest,
    observer: Observer = SILENT,
    told: Callable[[Written[AttachResult]], None] = ignore,
) -> WriteReport[AttachResult]:
    """Attach the scores of a file on one hub after the other.

    Args:
        request: what and where.
        observer: told which hub is written to.
        told: called with each result as soon as a hub has taken the scores.

    Raises:
        OscarZooError: as `own_scores.load`, and as `registry.attach_scores` from the first hub.
    """
    file, what = own_scores.load(request.file), path_text(request.file)

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
