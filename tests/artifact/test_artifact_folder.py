"""Which artifact of a folder of artifacts belongs to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.artifact.artifact_folder import artifact_of_model
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, PathNotFound


def tree(folder: Path, *names: str, with_manifest: bool = False) -> Path:
    for name in names:
        artifact = "/".join(name.split("/")[-2:])
        write_folder(folder / name, artifact_files(artifact=artifact, with_manifest=with_manifest))
    return folder


@pytest.mark.parametrize("model", ["Qwen/Tiny-A", "Tiny-A", "tiny-a", "other/Tiny-A"])
def test_the_folder_named_like_the_model_is_taken(tmp_path: Path, model: str) -> None:
    tree(tmp_path, "Tiny-A/gpqa_group64", "Tiny-B/calibrated")
    assert artifact_of_model(tmp_path, model) == tmp_path / "Tiny-A" / "gpqa_group64"


def test_files_may_lie_directly_in_the_folder_of_the_model(tmp_path: Path) -> None:
    tree(tmp_path, "Tiny-A", "org/Tiny-B/calibrated")
    assert artifact_of_model(tmp_path, "Tiny-A") == tmp_path / "Tiny-A"
    assert artifact_of_model(tmp_path, "Tiny-B") == tmp_path / "org" / "Tiny-B" / "calibrated"


def test_a_model_is_also_called_by_the_folder_it_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path / "zoo", "Tiny-A/calibrated", "Tiny-B/calibrated")
    plain = tmp_path / "models" / "Tiny-A"
    cached = tmp_path / "models--Qwen--Tiny-B" / "snapshots" / ("0" * 40)
    for folder in (plain, cached):
        folder.mkdir(parents=True)
    zoo = tmp_path / "zoo"
    assert artifact_of_model(zoo, str(plain)) == zoo / "Tiny-A" / "calibrated"
    assert artifact_of_model(zoo, f"{plain}/") == zoo / "Tiny-A" / "calibrated"
    assert artifact_of_model(zoo, str(cached)) == zoo / "Tiny-B" / "calibrated"
    monkeypatch.chdir(plain)
    assert artifact_of_model(zoo, ".") == zoo / "Tiny-A" / "calibrated"


def test_a_manifest_names_the_model_whatever_its_folder_is_called(tmp_path: Path) -> None:
    write_folder(tmp_path / "one" / "x", artifact_files(artifact="Tiny-A/calibrated"))
    write_folder(tmp_path / "two" / "x", artifact_files(artifact="Tiny-B/calibrated"))
    (tmp_path / "broken" / "x").mkdir(parents=True)
    (tmp_path / "broken" / "x" / "oscar.json").write_text("{")
    assert artifact_of_model(tmp_path, "Tiny-B") == tmp_path / "two" / "x"


def test_the_organisation_decides_between_two_models_of_one_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "Tiny-A" / "x", artifact_files(artifact="Tiny-A/x"))
    write_folder(
        tmp_path / "b" / "Tiny-A" / "x", artifact_files(artifact="Tiny-A/x", with_manifest=False)
    )
    assert artifact_of_model(tmp_path, "oscar-zoo/Tiny-A") == tmp_path / "a" / "Tiny-A" / "x"
    with pytest.raises(AmbiguousName):
        artifact_of_model(tmp_path, "Tiny-A")


def test_the_folder_of_one_artifact_or_of_one_model_is_a_tree_too(tmp_path: Path) -> None:
    tree(tmp_path, "Tiny-A/calibrated", "Tiny-B/calibrated")
    assert artifact_of_model(tmp_path / "Tiny-A", "Tiny-A") == tmp_path / "Tiny-A" / "calibrated"
    assert (
        artifact_of_model(tmp_path / "Tiny-A" / "calibrated", "any")
        == tmp_path / "Tiny-A" / "calibrated"
    )


def test_several_artifacts_of_the_model_are_named(tmp_path: Path) -> None:
    tree(tmp_path, "Tiny-A/calibrated", "Tiny-A/hadamard", "Tiny-B/calibrated")
    with pytest.raises(AmbiguousName) as caught:
        artifact_of_model(tmp_path, "Qwen/Tiny-A")
    assert str(tmp_path / "Tiny-A" / "calibrated") in caught.value.message
    assert str(tmp_path / "Tiny-A" / "hadamard") in caught.value.message
    assert "Tiny-B" not in caught.value.message


def test_a_tree_without_the_model_names_what_is_there(tmp_path: Path) -> None:
    tree(tmp_path, "Tiny-A/calibrated", "Tiny-B/calibrated")
    with pytest.raises(
        ArtifactNotFound, match="is for Tiny-C: it has Tiny-A/calibrated, Tiny-B/calibrated"
    ):
        artifact_of_model(tmp_path, "Tiny-C")
    with pytest.raises(PathNotFound, match="no such folder"):
        artifact_of_model(tmp_path / "nothing", "Tiny-A")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PathNotFound, match="no rotation files"):
        artifact_of_model(tmp_path / "empty", "Tiny-A")
