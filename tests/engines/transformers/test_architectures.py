"""Models whose layers are not all of one kind: states, convolutions, sliding windows, caps, learned
sinks, both kinds in one layer. And what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, shorten_chunks, write_architecture
from cache_oracle import general_set

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.evaluate.generate import GenerationRequest
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.transformers import OscarCache

IDS = torch.randint(3, 2000, (300,), generator=torch.Generator().manual_seed(1))[:70]
MIXED = (
    "falcon_h1", "gemma2", "gemma3", "gemma4", "gpt_oss", "granite-4-h", "lfm2", "nemotron_h",
    "qwen3_5_moe", "qwen3_next", "smollm3",
)  # fmt: skip


def pair(model: LoadedModel, role: str) -> RotationSet:
    """General, and keys lack a mean, which caps and learned sinks see."""
    block, ids = model.block, model.block.attention_layers
    made = general_set(role, len(ids), block.num_kv_heads, block.head_dim, seed=3)
    layers = zip(made.layers, ids, strict=True)
    return replace(made, layers=tuple(replace(one, layer_id=at) for one, at in layers))


@pytest.mark.parametrize("name", MIXED)
def test_tokens_of_mixed_models(name: str, device: str, replayed: Any, tmp_path: Path) -> None:
    folder = shorten_chunks(write_architecture(name, tmp_path, dtype="float32"))
    model = load_model(str(folder), dtype="float32", device=device)
    model.model.set_experts_implementation("eager")
    windows, group = Windows(sink=4, recent=9), model.block.head_dim // 4
    recipe = ServingRecipe(group_size=group, clip=Clip(k=0.96, v=0.92), windows=windows)
    spec = CacheSpec(pair(model, "k"), pair(model, "v"), recipe)
    assert spec.k is not None and spec.v is not None
    found = set()
    for way in ("keep", "auto"):
        cache = OscarCache(model.model, spec.k, spec.v, recipe, attention=way)  # type: ignore[arg-type]
        got = model.model.generate(
            IDS[None].to(device), past_key_values=cache, max_new_tokens=10, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, len(IDS) :]  # fmt: skip
        found.add(tuple(got.tolist()))
    for new in found:  # one, but for roundings of a GPU
        request = GenerationRequest(model, spec)
        assert [*new] == replayed(request, request.extend(IDS)[-1], torch.tensor(new))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3n"])
def test_what_is_no_cache_of_rows_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        OscarCache.bytes_for(ARCHITECTURES[name].configuration(), 100)
