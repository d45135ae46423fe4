from importlib import resources

import pytest

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import ArtifactId, CalibrationTag
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.catalog import SCHEMA_NAME, Catalog, recipe_for


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.packaged()


@pytest.mark.parametrize("name", ["Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B", "QWEN/QWEN3-8b"])
def test_a_model_is_found_by_name_and_hub_id_in_any_case(catalog: Catalog, name: str) -> None:
    recipe = catalog.recipe(name)
    assert recipe is not None and recipe.name == "Qwen3-8B"
    assert recipe_for(name) == recipe


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen3-7b", "Qwen3-8B"),
        ("Qwen/Qwen3.5-9b-fp8", "Qwen3.5-9B"),
        ("misral-small", "Mistral-Small-3.2-24B-Instruct-2506"),
        ("nemotron-nano", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    ],
)
def test_near_misses_name_the_model_meant(catalog: Catalog, typed: str, meant: str) -> None:
    assert catalog.recipe(typed) is None
    assert meant in catalog.close_matches(typed)


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("Qwen3-VL-8B", "Qwen3-VL-8B-Instruct"),
        ("qwen3.5-9b-instruct", "Qwen3.5-9B"),
        ("coder", "Qwen3-Coder-480B-A35B-Instruct"),
        ("mymodl", "MyModel"),
        ("tencent/Hunyuan-7B-Instruct", None),
        ("DeepSeek-R1-Distill-Qwen-7B", None),
        ("", None),
    ],
)
def test_names_with_all_words_come_before_names_with_similar_letters(
    catalog: Catalog, typed: str, first: str | None
) -> None:
    assert next(iter(catalog.close_matches(typed, ["MyModel"])), None) == first


def test_names_must_not_collide(catalog: Catalog) -> None:
    first, second = catalog.recipes()[:2]
    with pytest.raises(ValueError, match="names both"):
        Catalog([first, second.model_copy(update={"aliases": (first.name.upper(),)})])


def test_an_organisation_may_be_dropped_only_where_one_model_is_left(catalog: Catalog) -> None:
    recipe = catalog.recipe("Qwen3-8B")
    assert recipe is not None
    other = recipe.model_copy(update={"name": "fork", "hf_id": "fork/Base", "aliases": ()})
    another = recipe.model_copy(update={"name": "spoon", "hf_id": "spoon/Base", "aliases": ()})
    assert Catalog([other]).recipe("base") == other
    assert Catalog([other, another]).recipe("base") is None
    assert Catalog([other, another]).recipe("Spoon/base") == another


def test_the_packaged_manifests_invent_nothing(catalog: Catalog) -> None:
    for manifest in catalog.manifests():
        recipe = catalog.recipe(manifest.model.id)
        tag = CalibrationTag.parse(manifest.artifact_id.tag)
        calibration = manifest.fit.calibration
        assert recipe is not None and tag is not None and calibration is not None
        assert manifest.digest is None and manifest.provenance.kind == "imported"
        assert manifest.model.geometry == recipe.geometry
        assert (calibration.tokens_requested, calibration.sequences) == (tag.tokens, tag.prompts)
        assert calibration.overlaps_with == ("gpqa_diamond",)
        assert calibration.disjoint_from is None
        assert manifest.recipe.clip.v == (0.96 if recipe.name == "Qwen3-32B" else 0.92)


def test_default_tags_are_published_and_scored(catalog: Catalog) -> None:
    for recipe in catalog.recipes():
        if recipe.default_tag is not None:
            manifest = catalog.manifest(ArtifactId(recipe.name, recipe.default_tag))
            assert manifest is not None
            assert manifest.registry is not None
            assert manifest.registry.scores[0].value is not None


def test_manifest_files_are_in_their_canonical_form(catalog: Catalog) -> None:
    root = resources.files("oscar_zoo.manifests")
    for manifest in catalog.manifests():
        model, tag = manifest.id.split("/")
        data = (root / model / f"{tag}.json").read_bytes()
        assert data == manifest.to_bytes()
        assert Manifest.from_bytes(data, registry=True) == manifest


def test_the_schema_file_is_current() -> None:
    data = (resources.files("oscar_zoo.manifests") / SCHEMA_NAME).read_bytes()
    assert data == strict_json.pretty_bytes(Manifest.model_json_schema(by_alias=True))


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("qwen3.5", {"Qwen3.5"}),
        ("Qwen3", {"Qwen3"}),  # a whole name means nothing longer
        ("gemma", {"Gemma-3", "Gemma-4"}),
        ("GLM-4.", {"GLM-4.5", "GLM-4.6", "GLM-4.7"}),
    ],
)
def test_families_are_named_by_beginnings(catalog: Catalog, name: str, families: set[str]) -> None:
    assert {recipe.family for recipe in catalog.of_family(name)} == families


@pytest.mark.parametrize(
    ("name", "meant"), [("gema", "Gemma-3"), ("qwen-3.5", "Qwen3.5"), ("", None), ("zzzzzz", None)]
)
def test_unknown_families_bring_near_ones(catalog: Catalog, name: str, meant: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        catalog.of_family(name)
    if meant is not None:
        assert meant in caught.value.suggestions
    else:
        assert all(family in str(caught.value.hint) for family in catalog.families())
