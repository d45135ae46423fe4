"""How far a cache moves what a model says: against the definition, and by branches of one run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import write_architecture
from tiny_models import write_model

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Widths, Windows
from oscar_zoo.compute.select.widths import SIDES, widths_of
from oscar_zoo.evaluate import measure
from oscar_zoo.evaluate.measure import (
    TaskPrompt,
    divergences_of_changes,
    exact_predictions,
    measure_divergence,
)
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.loading import LoadedModel, load_model

LAYERS, TOKENS = 3, 40
RECIPE = ServingRecipe(
    group_size=16, clip=Clip(k=0.9, v=0.9), windows=Windows(sink=2, recent=6, dtype="float32")
)
PROMPTS = tuple(
    TaskPrompt(
        torch.randint(0, 2048, (TOKENS,), generator=torch.Generator().manual_seed(seed)),
        torch.arange(8, TOKENS - 1),
    )
    for seed in range(2)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), layers=LAYERS)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LoadedModel]:
    yield load_model(str(folder))


def cache(loaded: LoadedModel, widths: Widths | None = None) -> CacheSpec:
    k, v = hadamard_set(loaded.block, "k"), hadamard_set(loaded.block, "v")
    return CacheSpec(k, v, RECIPE.with_widths(widths))


def raised(layer: int) -> Widths:
    """2 bits everywhere, but 4 for the keys of one layer."""
    plain = Widths.uniform(LAYERS, k=2, v=2, clip=RECIPE.clip)
    bits = tuple(4 if at == layer else 2 for at in range(LAYERS))
    return plain.model_copy(update={"k": plain.k.model_copy(update={"bits": bits})})


def test_it_is_the_mean_divergence_over_scored_positions(loaded: LoadedModel) -> None:
    found = measure_divergence(loaded, exact_predictions(loaded, PROMPTS), cache(loaded))
    want, number = 0.0, 0
    simulated = SimulatedCache(cache(loaded), loaded.block, loaded.device)
    for prompt, part in zip(PROMPTS, found.parts, strict=True):
        with torch.inference_mode():
            p = loaded.model(prompt.ids[None]).logits[0, prompt.scored].double().log_softmax(-1)
            with attention_scope(loaded, simulated):
                q = loaded.model(prompt.ids[None]).logits[0, prompt.scored].double().log_softmax(-1)
        total = float((p.exp() * (p - q)).sum())
        assert part == (pytest.approx(total, rel=1e-3), len(prompt.scored))
        want, number = want + total, number + len(prompt.scored)
    assert found.value == pytest.approx(want / number, rel=1e-3)
    assert found.value > 1e-3


def test_a_cache_that_rounds_nothing_has_none(loaded: LoadedModel) -> None:
    wide = RECIPE.override(recent=TOKENS)
    found = measure_divergence(
        loaded, exact_predictions(loaded, PROMPTS), CacheSpec(None, None, wide)
    )
    assert found.value < 1e-6


def test_memory_for_the_sample_is_bounded_and_spread_over_the_prompts(loaded: LoadedModel) -> None:
    vocabulary = 2048
    exact = exact_predictions(loaded, PROMPTS, max_bytes=2 * vocabulary * 10)
    assert sum(kept.nbytes for kept in exact.log_probabilities) <= 2 * vocabulary * 10
    assert [len(prompt.scored) for prompt in exact.prompts] == [5, 5]
    assert exact.positions == 10
    for prompt in exact.prompts:
        assert 8 == prompt.scored[0] < TOKENS // 2 < prompt.scored[-1]
    assert measure_divergence(loaded, exact, cache(loaded)).value > 1e-3


@pytest.mark.parametrize("streamed", [False, True])
def test_branches_of_one_run_are_whole_runs_to_the_bit(
    folder: Path, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several rounds, when memory has room for few branches."""
    model = load_model(str(folder), stream=streamed)
    assert model.streamed is streamed
    exact, base, ticks = exact_predictions(model, PROMPTS), cache(model), []
    changes = [(layer, cache(model, raised(layer))) for layer in range(LAYERS)]
    monkeypatch.setattr(measure, "BRANCH_BYTES", 3 * TOKENS * 2 * 32 * 4)
    found = divergences_of_changes(model, exact, base, changes, tick=lambda: ticks.append(0))
    want = [measure_divergence(model, exact, spec) for _, spec in changes]
    assert found == want
    assert len({one.value for one in (*found, measure_divergence(model, exact, base))}) == 4
    assert len(ticks) == len(changes) * len(PROMPTS)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gemma3_text", "qwen3_5"])
def test_branches_that_run_together_give_the_same(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; all layers raised, so that batches grow and shrink."""
    model = load_model(str(write_architecture(architecture, tmp_path / "model")))
    layers, ids = model.block.attention_layers, PROMPTS[0].ids % 256
    prompts = tuple(TaskPrompt(ids + at, PROMPTS[0].scored) for at in range(2))
    base = CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), RECIPE)
    changes = [
        (layer, replace(base, recipe=widths_of(RECIPE, len(layers), {(index, side)})))
        for index, layer in enumerate(layers)
        for side in SIDES
    ]
    exact = exact_predictions(model, prompts)
    alone = divergences_of_changes(model, exact, base, changes)
    batches = []
    run = measure.advance_together
    monkeypatch.setattr(
        measure,
        "advance_together",
        lambda states, *given, **options: (
            batches.append(len(states)),
            run(states, *given, **options),
        ),
    )
    monkeypatch.setattr(measure, "BATCH_TOKENS", {"cpu": 2 * TOKENS})
    together = divergences_of_changes(model, exact, base, changes)
    assert max(batches) > 1
    for one, other in zip(together, alone, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-3)


def test_whole_layers_give_the_same(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = exact_predictions(loaded, PROMPTS)
    change = [(1, cache(loaded, raised(1)))]
    want = divergences_of_changes(loaded, exact, cache(loaded), change)
    monkeypatch.setattr(measure, "known_plan", lambda *given: None)
    assert divergences_of_changes(loaded, exact, cache(loaded), change) == want
