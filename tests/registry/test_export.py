from pathlib import Path

import pytest
from hub_uses import HARD, hub_with, pull
from tiny_artifacts import K_NAME, artifact_files

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.errors import OutputExists, StorageError
from oscar_zoo.registry.store import Store, StoredArtifact, export


@pytest.fixture
def stored(tmp_path: Path) -> StoredArtifact:
    return pull(
        "tiny-qwen3-hard", hub_with(tmp_path / "hub", artifact_files()), Store(tmp_path / "cache")
    ).artifact


def test_the_layout_is_that_of_the_public_hub(tmp_path: Path, stored: StoredArtifact) -> None:
    place = export(stored, tmp_path / "out" / "rotations")
    assert place == tmp_path / "out" / "rotations" / HARD.model / HARD.tag
    assert {path.name: path.read_bytes() for path in place.iterdir()} == artifact_files()
    assert verify_path(place).digest == stored.record.digest  # type: ignore[union-attr]
    assert export(stored, tmp_path / "out" / "rotations") == place


def test_copies_cannot_harm_the_store(tmp_path: Path, stored: StoredArtifact) -> None:
    copy = export(stored, tmp_path) / K_NAME
    copy.write_bytes(b"mine now")
    assert Store(tmp_path / "cache").open(stored.record.digest).files == artifact_files()


@pytest.mark.parametrize("other", ["changed", "more", "less", "file"])
def test_other_content_is_kept_unless_it_may_be_replaced(
    tmp_path: Path, stored: StoredArtifact, other: str
) -> None:
    place = tmp_path / HARD.model / HARD.tag

    def content() -> object:
        if place.is_file():
            return place.read_bytes()
        return {path.name: path.read_bytes() for path in place.iterdir()}

    if other == "file":
        place.parent.mkdir()
        place.write_text("a file")
    else:
        export(stored, tmp_path)
        name = "notes.txt" if other == "more" else K_NAME
        (place / name).unlink() if other == "less" else (place / name).write_bytes(b"other")
    before = content()
    with pytest.raises((OutputExists, StorageError) if other == "file" else OutputExists):
        export(stored, tmp_path)
    assert content() == before
    export(stored, tmp_path, replace=True)
    assert content() == artifact_files()
    assert [p.name for p in place.parent.iterdir()] == [HARD.tag]
