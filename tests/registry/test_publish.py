from __future__ import annotations

from pathlib import Path

import pytest
from tiny_artifacts import K_NAME, V_NAME, artifact_files, manifest, payload, write_folder

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import PathNotFound, UsageError, VerificationFailed, VersionExists
from oscar_zoo.hubs.local import LocalHub
from oscar_zoo.registry.publish import publish
from oscar_zoo.registry.pull import pull
from oscar_zoo.registry.store import Store

HARD = ArtifactId.parse("tiny-qwen3-hard/seq512_prompt2_group64")


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    return LocalHub(tmp_path / "hub", must_exist=False)


def test_publish_then_pull_gives_the_same_bytes(tmp_path: Path, hub: LocalHub) -> None:
    folder = write_folder(tmp_path / "out", {**artifact_files(), "report.html": b"<p>not part of it</p>"})
    result = publish(folder, hub)
    assert (result.id, result.already_published) == (HARD, False)
    assert hub.artifacts() == (HARD,)
    pulled = pull("tiny-qwen3-hard", hub, Store(tmp_path / "cache"))
    assert pulled.artifact.files == artifact_files()
    assert pulled.artifact.record.digest == result.digest


def test_publishing_twice_is_success(tmp_path: Path, hub: LocalHub) -> None:
    folder = write_folder(tmp_path / "out", artifact_files())
    first = publish(folder, hub, artifact_id=HARD)
    second = publish(folder, hub)
    assert second.already_published
    assert second.digest == first.digest


def test_the_same_content_computed_again_is_already_published(tmp_path: Path, hub: LocalHub) -> None:
    files = artifact_files()
    publish(write_folder(tmp_path / "one", files), hub)
    later = Manifest.from_bytes(files["oscar.json"]).model_copy(update={"created": "2030-01-01T00:00:00Z"})
    again = publish(write_folder(tmp_path / "two", files | {"oscar.json": later.to_bytes()}), hub)
    assert again.already_published
    assert hub.fetch(HARD, "oscar.json", limit=1 << 20) == files["oscar.json"]


def test_the_same_payload_with_another_serving_recipe_is_refused(tmp_path: Path, hub: LocalHub) -> None:
    files = artifact_files()
    publish(write_folder(tmp_path / "one", files), hub)
    first = Manifest.from_bytes(files["oscar.json"])
    clip = first.recipe.clip.model_copy(update={"k": 0.5})
    changed = first.model_copy(update={"recipe": first.recipe.model_copy(update={"clip": clip})})
    with pytest.raises(VersionExists):
        publish(write_folder(tmp_path / "two", files | {"oscar.json": changed.to_bytes()}), hub)


def test_other_bytes_under_a_published_id_are_refused(tmp_path: Path, hub: LocalHub) -> None:
    publish(write_folder(tmp_path / "one", artifact_files()), hub)
    with pytest.raises(VersionExists) as caught:
        publish(write_folder(tmp_path / "two", artifact_files(seed=1)), hub)
    assert str(HARD) in caught.value.message
    assert "tag" in (caught.value.hint or "")


def test_a_folder_without_manifest_is_refused_with_the_next_step(tmp_path: Path, hub: LocalHub) -> None:
    with pytest.raises(UsageError, match=r"oscar\.json") as caught:
        publish(write_folder(tmp_path / "out", payload()), hub)
    assert "compute" in (caught.value.hint or "")
    with pytest.raises(PathNotFound):
        publish(tmp_path / "missing", hub)
    assert hub.artifacts() == ()


def test_a_missing_and_an_unlisted_file_are_refused(tmp_path: Path, hub: LocalHub) -> None:
    files = artifact_files()
    with pytest.raises(PathNotFound, match="v_rotation"):
        publish(write_folder(tmp_path / "less", {n: d for n, d in files.items() if n != V_NAME}), hub)
    with pytest.raises(UsageError, match=r"third\.pt"):
        publish(write_folder(tmp_path / "more", {**files, "third.pt": files[K_NAME]}), hub)
    assert hub.artifacts() == ()


def test_another_id_than_the_manifests_is_refused(tmp_path: Path, hub: LocalHub) -> None:
    with pytest.raises(UsageError, match="tiny-qwen3-hard"):
        publish(write_folder(tmp_path / "out", artifact_files()), hub, artifact_id=ArtifactId("tiny-qwen3-hard", "new"))


def test_what_fails_verification_never_reaches_a_hub(tmp_path: Path, hub: LocalHub) -> None:
    files = payload()
    swapped = {K_NAME: files[V_NAME], V_NAME: files[V_NAME]}
    swapped[FILE_NAME] = manifest(swapped).to_bytes()
    with pytest.raises(VerificationFailed) as caught:
        publish(write_folder(tmp_path / "swapped", swapped), hub)
    assert caught.value.outcome is not None
    changed = artifact_files()
    changed[K_NAME] = changed[K_NAME][:-1] + b"?"
    with pytest.raises(VerificationFailed):
        publish(write_folder(tmp_path / "changed", changed), hub)
    assert hub.artifacts() == ()


def test_a_link_in_the_folder_is_refused(tmp_path: Path, hub: LocalHub) -> None:
    folder = write_folder(tmp_path / "out", artifact_files())
    (folder / K_NAME).rename(tmp_path / "elsewhere.pt")
    (folder / K_NAME).symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(Exception, match="regular file"):
        publish(folder, hub)
    assert hub.artifacts() == ()
