"""From a folder, two files or the local store to one artifact, or to an error that says which file
is wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import latents
import pytest
from tiny_artifacts import K_NAME, V_NAME, artifact_files, manifest, payload, rotation, write_folder

from oscar_zoo import errors
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines.served_artifact import LATENTS, load, recipe_values
from oscar_zoo.engines.settings import ArtifactSource, RecipeValues
from oscar_zoo.registry.store import Store

FIT = {"layer_ids": (0, 1, 2, 3), "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}


def test_a_folder_with_a_manifest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", artifact_files())
    loaded = load(ArtifactSource(folder=str(folder)))
    assert loaded.digest == manifest(payload()).digest
    assert loaded.recipe == RecipeValues(group_size=64)
    assert loaded.k.declared_role == "k" and loaded.v.declared_role == "v"
    loaded.check_geometry(**FIT)


def test_without_a_manifest_the_digest_is_of_two_files_without_a_recipe(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", artifact_files(with_manifest=False))
    loaded = load(ArtifactSource(folder=str(folder)))
    assert loaded.digest == manifest(payload()).digest
    assert loaded.recipe is None and loaded.manifest is None
    same = load(ArtifactSource(files=(str(folder / K_NAME), str(folder / V_NAME))), loaded.digest)
    assert same.digest == loaded.digest


def test_latents_have_one_file_for_keys_and_values(tmp_path: Path) -> None:
    folder = latents.write_artifact(tmp_path / "a", carried=False)
    loaded = load(ArtifactSource(folder=str(folder)))
    assert loaded.latent and loaded.v is loaded.k and loaded.names == {"k": latents.NAME}
    model: dict[str, Any] = {
        "layer_ids": tuple(range(latents.LAYERS)),
        "num_kv_heads": 1,
        "head_dim": latents.RANK,
        "v_head_dim": latents.RANK,
    }
    loaded.check_geometry(**model, latent=True)
    with pytest.raises(errors.GeometryMismatch, match="caches keys and values of heads"):
        loaded.check_geometry(**model)
    staged = tmp_path / "staged"  # as `oscar-zoo serve` does it, without a manifest
    staged.mkdir()
    (staged / LATENTS).write_bytes((folder / latents.NAME).read_bytes())
    again = load(ArtifactSource(folder=str(staged)))
    assert again.latent and again.manifest is None and again.k.layer_ids == loaded.k.layer_ids
    (folder / latents.NAME).write_bytes(payload()[K_NAME])
    with pytest.raises(errors.DigestMismatchError, match=latents.NAME):
        load(ArtifactSource(folder=str(folder)))


def test_a_folder_of_several_artifacts_gives_that_of_the_model(tmp_path: Path) -> None:
    for name, seed in (("Tiny-A/x", 0), ("Qwen3-8B/x", 1)):
        write_folder(tmp_path / "zoo" / name, artifact_files(artifact=name, seed=seed))
    zoo = ArtifactSource(folder=str(tmp_path / "zoo"))
    assert load(zoo, model="org/Tiny-A").digest == manifest(payload()).digest
    assert load(zoo, model="Qwen/Qwen3-8B").digest == manifest(payload(seed=1)).digest
    with pytest.raises(errors.ArtifactNotFound, match="Tiny-B: it has Qwen3-8B/x, Tiny-A/x"):
        load(zoo, model="Tiny-B")
    one = ArtifactSource(folder=str(tmp_path / "zoo" / "Tiny-A" / "x"))
    assert load(one, model="Tiny-B").digest == manifest(payload()).digest


def test_another_digest_than_expected_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", artifact_files())
    digest = str(manifest(payload()).digest)
    for form in (digest, digest.removeprefix("sha256:")):
        assert load(ArtifactSource(folder=str(folder)), form).digest == digest
    with pytest.raises(errors.DigestMismatchError, match="0" * 64):
        load(ArtifactSource(folder=str(folder)), "0" * 64)


def test_a_file_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    files = {**artifact_files(), K_NAME: payload(seed=9)[K_NAME]}
    with pytest.raises(errors.DigestMismatchError, match=K_NAME):
        load(ArtifactSource(folder=str(write_folder(tmp_path / "a", files))))


def test_a_name_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_ZOO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        errors.ArtifactNotFound, match="tiny-qwen3-hard is not in the local store"
    ) as caught:
        load(ArtifactSource(artifact="tiny-qwen3-hard"))
    assert caught.value.hint == "oscar-zoo pull tiny-qwen3-hard"
    identity = ArtifactId.parse("tiny-qwen3-hard/seq512_prompt2_group64")
    Store(tmp_path / "cache").put(identity, artifact_files(), source="test")
    loaded = load(ArtifactSource(artifact="tiny-qwen3-hard"))
    assert loaded.digest == manifest(payload()).digest and loaded.recipe.group_size == 64


SHORTER = replace(rotation("sst_r_h_pbr"), layers=rotation("sst_r_h_pbr").layers[:3])


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ({}, errors.PathNotFound, "K rotation file"),
        ({K_NAME: payload()[K_NAME]}, errors.PathNotFound, "V rotation file"),
        (
            {**payload(), "k_other.pt": payload(seed=2)[K_NAME]},
            errors.UsageError,
            f"several K files: k_other.pt, {K_NAME}",
        ),
        ({**payload(), V_NAME: rotation_bytes(SHORTER)}, errors.UsageError, "not of one fit"),
    ],
)
def test_folders_that_do_not_hold_one_pair(
    tmp_path: Path, files: dict[str, bytes], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load(ArtifactSource(folder=str(write_folder(tmp_path / "a", files))))


def test_no_folder_and_two_files_the_wrong_way_round(tmp_path: Path) -> None:
    with pytest.raises(errors.PathNotFound, match="no such folder of rotations"):
        load(ArtifactSource(folder=str(tmp_path / "none")))
    folder = write_folder(tmp_path / "a", payload())
    with pytest.raises(errors.UsageError, match=f"{V_NAME} is not a K file"):
        load(ArtifactSource(files=(str(folder / V_NAME), str(folder / K_NAME))))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"layer_ids": tuple(range(36))},
            "was made for 4 layers with full attention, this model has 36",
        ),
        (
            {"layer_ids": (0, 1, 2, 4)},
            "was made for 0, 1, 2, 3 full-attention layers, this model has 0, 1, 2, 4",
        ),
        ({"head_dim": 128}, "was made for 64 head_dim, this model has 128"),
        ({"v_head_dim": 32}, "was made for 64 v_head_dim, this model has 32"),
        ({"num_kv_heads": 8}, "was made for 2 KV heads of the manifest, this model has 8"),
    ],
)
def test_the_artifact_of_another_model(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    loaded = load(ArtifactSource(folder=str(write_folder(tmp_path / "a", artifact_files()))))
    with pytest.raises(errors.GeometryMismatch, match=text):
        loaded.check_geometry(**{**FIT, **changed})


def test_recipes_are_followed_or_refused() -> None:
    recipe = ServingRecipe(group_size=32, clip=Clip(k=0.5, v=0.4, algorithm="none"))
    assert recipe_values(recipe) == RecipeValues(k_clip=(0.0,), v_clip=(0.0,), group_size=32)
    for refused in (
        ServingRecipe(group_size=32, clip=Clip(k=0.5, v=0.4), quantizer="lloydmax-uniform-u2/1"),
        ServingRecipe(group_size=32, clip=Clip(k=0.5, v=0.4, algorithm="absrank-bisect7/1")),
    ):
        with pytest.raises(errors.UsageError, match="the recipe asks for"):
            recipe_values(refused)


def test_scales_of_another_type_are_told(tmp_path: Path) -> None:
    files = payload()
    described = manifest(files)
    wide = described.model_copy(
        update={"recipe": described.recipe.model_copy(update={"scale_dtype": "float32"})}
    )
    folder = write_folder(tmp_path / "a", {**files, FILE_NAME: wide.to_bytes()})
    assert "16 bit" in load(ArtifactSource(folder=str(folder))).warnings[0]
