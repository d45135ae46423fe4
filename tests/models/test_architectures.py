"""Every architecture that people serve: our attention is the model's own, and what cannot be
computed is said from `config.json` alone."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, shorten_chunks, write_architecture, write_config
from torch import Tensor

from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.evaluate.generate import prefill_log_probabilities
from oscar_zoo.models.attention import Softmax, attend, attention_scope
from oscar_zoo.models.config_file import ConfigFile, geometry_of_folder, says_all
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.models.model_source import inspect_model, outline

REFUSED = {
    "gemma3n": "shares one KV cache",
    "gemma4-shared": "shares one KV cache",
    "mimo_v2_flash": "a model type that transformers",
    "mistral-window": "every layer has a sliding window",
    "mllama": "cross-attention",
    "t5": "encoder-decoder",
}
COMPUTED = sorted(ARCHITECTURES.keys() - REFUSED.keys())
LENGTH = 600
"""More tokens than any window or chunk of these models."""


def tokens() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(10, 2048, (1, LENGTH), generator=draw)


def eager_logits(folder: Path, loaded: LoadedModel) -> Tensor:
    """What the model's own code in transformers computes, by another way of loading."""
    model = type(loaded.model).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model.eval()(input_ids=tokens(), use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", COMPUTED)
def test_attention_is_the_models_own(name: str, tmp_path: Path) -> None:
    """As loaded, and when a function of ours replaces it; windows and chunks stay."""
    folder = shorten_chunks(write_architecture(name, tmp_path / name, dtype="float32"))
    loaded = load_model(str(folder))
    want = eager_logits(folder, loaded)
    seen = set()

    def plain(layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        seen.add(layer)
        width = loaded.block.head_dim + (loaded.block.rotary_key or 0)
        assert key.shape[1::2] == (loaded.block.num_kv_heads, width)
        assert value.shape[-1] == loaded.block.v_head_dim
        return attend(query, key, value, None, softmax)

    with torch.inference_mode():
        own = loaded.model(input_ids=tokens(), use_cache=False).logits
        with attention_scope(loaded, plain):
            replaced = loaded.model(input_ids=tokens(), use_cache=False).logits
    torch.testing.assert_close(own, want, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(replaced, want, atol=2e-4, rtol=1e-3)
    assert tuple(sorted(seen)) == loaded.block.attention_layers


@pytest.mark.parametrize("name", COMPUTED)
def test_the_file_alone_gives_the_geometry(name: str, tmp_path: Path) -> None:
    folder = write_config(name, tmp_path / name)
    geometry = inspect_model(str(folder)).geometry
    assert geometry_of_folder(folder) == geometry
    assert geometry.head_dim in (64, 96, 128)
    if name.startswith("gemma4"):
        assert says_all(ConfigFile.of_folder(folder))
        assert (geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim) == (2, 128, 128)
        assert geometry.attention_layers == (1, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence_before_weights_are_read(name: str, tmp_path: Path) -> None:
    """The folder has no weights at all."""
    folder = write_config(name, tmp_path / name)
    with pytest.raises(UnsupportedModel, match=REFUSED[name]) as refusal:
        load_model(str(folder))
    assert name in refusal.value.message
    assert "\n" not in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"model_type": "of_its_own", "auto_map": {"AutoConfig": "a.B"}}, "code that ships with a"),
        ({"model_type": "of_nobody", "kv_lora_rank": 512}, r"\(of_nobody\) is of a model type"),
        ({"model_type": "mamba2"}, "has no attention"),
    ],
)
def test_what_transformers_does_not_have_is_one_sentence(
    written: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(UnsupportedModel, match=said) as refusal:
        inspect_model(str(tmp_path))
    assert refusal.value.hint


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3", "smollm3"])
def test_text_in_chunks_is_text_at_once(name: str, tmp_path: Path) -> None:
    loaded = load_model(str(write_architecture(name, tmp_path / name, dtype="float32")))
    ids = tokens()[0, :90].tolist()
    chunked = prefill_log_probabilities(loaded, ids, cache=None, chunk_size=32)
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    whole = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(chunked), whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("Bloom", "computes attention in code"),
        ("Falcon", "computes attention in code"),
        ("ViT", r"no language model for mine \(vit\)"),
    ],
)
def test_what_nothing_can_watch_is_refused_without_weights(config: str, said: str) -> None:
    with torch.device("meta"), pytest.raises(UnsupportedModel, match=said):
        outline(getattr(transformers, f"{config}Config")(), "mine")
