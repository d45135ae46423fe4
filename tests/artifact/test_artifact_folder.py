"""Which artifact of a folder of artifacts belongs to a model."""

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


@pytest.mark.parametrize(
    ("tree_of", "model", "found"),
    [
        ("Tiny-A/gpqa_group64 Tiny-B/calibrated", "Qwen/Tiny-A", "Tiny-A/gpqa_group64"),
        ("Tiny-A/gpqa_group64 Tiny-B/calibrated", "tiny-a", "Tiny-A/gpqa_group64"),
        ("Tiny-A org/Tiny-B/calibrated", "Tiny-A", "Tiny-A"),
        ("Tiny-A org/Tiny-B/calibrated", "Tiny-B", "org/Tiny-B/calibrated"),
    ],
)
def test_the_folder_named_as_a_model(tmp_path: Path, tree_of: str, model: str, found: str) -> None:
    tree(tmp_path, *tree_of.split())
    assert artifact_of_model(tmp_path, model) == tmp_path / found


def test_the_folder_of_a_model_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = tree(tmp_path / "zoo", "Tiny-A/calibrated", "Tiny-B/calibrated")
    plain = tmp_path / "models" / "Tiny-A"
    cached = tmp_path / "models--Qwen--Tiny-B" / "snapshots" / ("0" * 40)
    for folder in (plain, cached):
        folder.mkdir(parents=True)
    monkeypatch.chdir(plain)
    for model in (str(plain), f"{plain}/", "."):
        assert artifact_of_model(zoo, model) == zoo / "Tiny-A" / "calibrated"
    assert artifact_of_model(zoo, str(cached)) == zoo / "Tiny-B" / "calibrated"


def test_a_manifest_names_the_model_whatever_its_folder_is_called(tmp_path: Path) -> None:
    write_folder(tmp_path / "one" / "x", artifact_files(artifact="Tiny-A/calibrated"))
    write_folder(tmp_path / "two" / "x", artifact_files(artifact="Tiny-B/calibrated"))
    (tmp_path / "broken" / "x").mkdir(parents=True)
    (tmp_path / "broken" / "x" / "oscar.json").write_text("{")
    assert artifact_of_model(tmp_path, "Tiny-B") == tmp_path / "two" / "x"


def test_the_organisation_decides_between_two_models_of_one_name(tmp_path: Path) -> None:
    for name, described in (("a", True), ("b", False)):
        files = artifact_files(artifact="Tiny-A/x", with_manifest=described)
        write_folder(tmp_path / name / "Tiny-A" / "x", files)
    assert artifact_of_model(tmp_path, "oscar-zoo/Tiny-A") == tmp_path / "a" / "Tiny-A" / "x"
    with pytest.raises(AmbiguousName):
        artifact_of_model(tmp_path, "Tiny-A")


def test_the_folder_of_one_artifact_or_of_one_model_is_a_tree_too(tmp_path: Path) -> None:
    tree(tmp_path, "Tiny-A/calibrated", "Tiny-B/calibrated")
    one = tmp_path / "Tiny-A" / "calibrated"
    assert artifact_of_model(one.parent, "Tiny-A") == artifact_of_model(one, "any") == one


def test_what_is_there_is_named_where_it_is_not_clear(tmp_path: Path) -> None:
    tree(tmp_path, "Tiny-A/calibrated", "Tiny-A/hadamard", "Tiny-B/calibrated")
    with pytest.raises(AmbiguousName) as several:
        artifact_of_model(tmp_path, "Qwen/Tiny-A")
    for name in ("calibrated", "hadamard"):
        assert str(tmp_path / "Tiny-A" / name) in several.value.message
    assert "Tiny-B" not in several.value.message
    with pytest.raises(ArtifactNotFound, match="Tiny-A/calibrated, Tiny-A/hadamard, Tiny-B"):
        artifact_of_model(tmp_path, "Tiny-C")
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty"):
        with pytest.raises(PathNotFound):
            artifact_of_model(tmp_path / name, "Tiny-A")
