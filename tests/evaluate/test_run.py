"""The comparison of caches on the example model: the order of the rows, the facts, and the
refusals."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_output import check
from tiny_artifacts import cache_shape
from tiny_models import EXAMPLE

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Widths, Windows
from oscar_zoo.errors import GeometryMismatch, UsageError
from oscar_zoo.evaluate.caches import evaluate
from oscar_zoo.evaluate.in_process import settings_of
from oscar_zoo.evaluate.measure import measure
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model

TEXT = (EXAMPLE.parents[1] / "text/validation.txt").read_text("utf-8")
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
SHARED = Path(__file__).resolve().parents[2].parent / "shared/models"


def recipe(**windows: int) -> ServingRecipe:
    """For the small model."""
    return ServingRecipe(group_size=16, clip=Clip(k=0.9, v=0.9), windows=Windows(**windows))


def test_every_combination_of_settings_is_measured_with_the_artifact(model: LoadedModel) -> None:
    artifact = hadamard_set(model.block, "k"), hadamard_set(model.block, "v")
    clips = Clip(k=0.0, v=0.0), Clip(k=0.9, v=0.9)
    settings = settings_of({"sink": (0, 8), "recent": (16,), "clip": clips}, recipe(sink=4))
    windows = [one.windows for one, _ in settings]
    assert [(one.sink, one.recent) for one in windows] == [(0, 16), (0, 16), (8, 16), (8, 16)]
    given: dict[str, Any] = {"artifact": artifact, "tasks": ("perplexity",), "windows": 1}
    given |= {"length": 128, "recipe": recipe(sink=4)}
    report = evaluate(model, TEXT[:20_000], settings=settings, **given)
    assert [row.cache for row in report.rows] == ["bf16", *["artifact"] * 4]
    assert [row.changes.get("clip") for row in report.rows[1:]] == ["0,0", "0.9,0.9"] * 2
    for row, (changed, _) in zip(report.rows[1:], settings, strict=True):
        alone = evaluate(model, TEXT[:20_000], **given | {"recipe": changed})
        same = next(one for one in alone.rows if one.cache == "artifact")
        assert row.perplexity == same.perplexity
        assert row.bits_per_element_with_windows == same.bits_per_element_with_windows
    assert report.compared == ()


def test_a_recipe_with_a_clip_for_each_layer_takes_no_other_clip() -> None:
    mixed = RECIPE.with_widths(Widths.uniform(2, k=4, v=2, clip=RECIPE.clip))
    with pytest.raises(UsageError, match="a clip ratio for each layer"):
        settings_of({"clip": (Clip(k=0.5, v=0.5),)}, mixed)
    ((changed, values),) = settings_of({"sink": (8,)}, mixed)
    assert (changed.widths, values) == (mixed.widths, {"sink": 8})


def test_the_report_has_the_facts_to_repeat_it(model: LoadedModel) -> None:
    given: dict[str, Any] = {"artifact": None, "recipe": recipe(sink=4, recent=8)}
    report = evaluate(model, TEXT[:4000], tasks=("perplexity",), windows=2, length=9999, **given)
    found = report.to_json()
    check(found)
    assert report.model.config_sha256 == model.block.config_sha256
    assert report.text_sha256 == hashlib.sha256(TEXT[:4000].encode()).hexdigest()
    assert (report.sink, report.recent, report.clip.k) == (4, 8, 0.9)
    assert found["tasks"]["perplexity"] == {"windows": 2, "length": 256, "predictions": 510}
    assert (report.chunking, report.torch) == ("every position exact", torch.__version__)
    names = ["bf16", "int2", "int2-hadamard", "int2-hadamard-clip"]
    assert [row["cache"] for row in found["rows"]] == names


def test_transforms_and_clip_show_on_the_example_model(example: LoadedModel) -> None:
    """Perplexity by cache, and that recall needs the cache."""
    seen: list[tuple[int, int, str]] = []
    report = evaluate(
        example,
        TEXT[:60_000],
        artifact=(hadamard_set(example.block, "k"), hadamard_set(example.block, "v")),
        recipe=RECIPE,
        windows=1,
        length=1024,
        answers=8,
        progress=lambda done, total, unit: seen.append((done, total, unit)),
    )
    rows = {row.cache: row for row in report.rows}
    order = ["bf16", "int2-hadamard-clip", "int2-hadamard", "int2"]
    assert list(rows) == ["bf16", "int2", "int2-hadamard", "int2-hadamard-clip", "artifact"]
    losses = [rows[name].perplexity or 0.0 for name in order]
    assert losses == sorted(losses) and losses[2] < losses[3] / 10
    assert rows["artifact"].perplexity == rows["int2-hadamard-clip"].perplexity
    assert (rows["bf16"].recall or 0) >= 0.9 and (rows["int2"].recall or 0) <= 0.2
    assert rows["int2"].bits_per_element == 2.5
    assert rows["int2"].bits_per_element_with_windows == 2.5 + 16 * 320 / 1024
    assert seen == [(i, 10, "sequences") for i in range(1, 11)]


def test_a_rotation_of_another_model_is_refused(example: LoadedModel) -> None:
    other = cache_shape(4, heads=4, kv_heads=2, dim=128)
    artifact = hadamard_set(other, "k"), hadamard_set(other, "v")
    with pytest.raises(GeometryMismatch, match="is for head_dim 128; tiny-qwen3-hard has 64"):
        evaluate(example, TEXT, artifact=artifact, recipe=RECIPE)


@pytest.mark.parametrize(
    ("text", "tasks", "said"),
    [(TEXT[:4000], ("gpqa",), "gpqa"), ("short", ("perplexity",), "tokens")],
)
def test_unknown_tasks_and_short_texts_are_refused(
    model: LoadedModel, text: str, tasks: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        evaluate(model, text, tasks=tasks, artifact=None, recipe=recipe())


@pytest.mark.slow
def test_the_reference_table_is_reproduced() -> None:
    name, want = "tiny-qwen3-hard", (3.699, 2354.0, 17.9, 10.2)
    if not (SHARED / name).is_dir():
        pytest.skip("the models and text of the reference table are not part of the repository")
    model = load_model(str(SHARED / name), dtype="float32")
    text = (SHARED / "text/validation.txt").read_text("utf-8")
    ids = torch.tensor(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    task = Perplexity.from_tokens(ids)
    # The table was made with float32 scales.
    plain = ServingRecipe(group_size=64, scale_dtype="float32", clip=Clip(k=0.0, v=0.0))
    clipped = ServingRecipe(group_size=64, scale_dtype="float32", clip=Clip(k=0.96, v=0.92))
    k, v = hadamard_set(model.block, "k"), hadamard_set(model.block, "v")
    specs = (None, CacheSpec(None, None, plain), CacheSpec(k, v, plain), CacheSpec(k, v, clipped))
    for spec, expected in zip(specs, want, strict=True):
        assert measure(model, task, spec).value == pytest.approx(expected, rel=5e-3)
