"""What a hub is: artifacts `<Model>/<tag>`, each a flat folder of files, and versions that never change.

A hub moves bytes and lists them; it verifies nothing. Whoever fetches hashes what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from oscar_zoo.artifact.names import ArtifactId

Progress = Callable[[str, int, int], None]
"""Called with a file's path, the bytes fetched so far and the bytes in total."""


@dataclass(frozen=True, order=True)
class HubFile:
    """One file of an artifact as a hub lists it; `sha256` is null where the hub does not tell."""

    path: str
    size: int
    sha256: str | None


class Hub(Protocol):
    """A place artifacts are read from and published to."""

    @property
    def name(self) -> str:
        """The hub as people write it, for messages: `file:/srv/zoo`."""
        ...

    def artifacts(self) -> tuple[ArtifactId, ...]:
        """Every artifact the hub has, sorted."""
        ...

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        """The files of `artifact`, sorted by path.

        Raises:
            ArtifactNotFound: the hub does not have it.
        """
        ...

    def fetch(self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None) -> bytes:
        """The bytes of one file, as they are.

        Args:
            artifact: which artifact.
            path: which of its files.
            limit: a file with more bytes than this is refused.
            progress: told about the bytes that arrived.

        Raises:
            NotFoundError: no such artifact or file.
            MalformedFile: `file.size`, or a name or link that must not be followed.
        """
        ...

    def commit(self, artifact: ArtifactId, files: Mapping[str, bytes]) -> bool:
        """Publish `files` as the new version `artifact`, all of them at once.

        Returns:
            True when this call published it, False when the same bytes were there already.

        Raises:
            VersionExists: the version exists with other bytes.
        """
        ...
