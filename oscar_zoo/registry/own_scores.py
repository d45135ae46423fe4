"""Score files on this machine: beside the `oscar.json` of a folder of the user's own, and for
artifacts of the store, whose folders never change, in the state folder."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo import paths
from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.errors import PathNotFound
from oscar_zoo.registry.score_file import FILE_NAME, ScoreFile
from oscar_zoo.registry.score_history import merged


def in_folder(folder: Path) -> Path:
    """The score file of the artifact folder `folder`."""
    return folder / FILE_NAME


def in_state(artifact: ArtifactId) -> Path:
    """The score file of an artifact that was measured by its name."""
    return paths.state_dir() / "scores" / artifact.model / f"{artifact.tag}.json"


def load(path: Path) -> ScoreFile:
    """The score file at `path`."""
    if not path.exists():
        raise PathNotFound.for_path(path_text(path), "score file")
    data = read_file(path, max_bytes=strict_json.MAX_BYTES)
    return ScoreFile.from_bytes(data, what=path_text(path))


def read(path: Path) -> ScoreFile | None:
    """As `load`, and `None` where there is none."""
    return load(path) if path.exists() else None


def keep(path: Path, new: ScoreFile) -> ScoreFile:
    """Add the scores of `new` to the file at `path`, in one step; scores of other bytes, from
    before the artifact was made anew, are dropped.
    """
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
