"""A stranger's model folder chooses no code: not by its attention, its tokenizer or its modules."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import EXAMPLE

from oscar_zoo.engines.sglang.launch.plan import set_variables
from oscar_zoo.engines.sglang.launch.preflight import check_folder
from oscar_zoo.errors import InvalidModel, UnsupportedModel
from oscar_zoo.models.attention import EXACT
from oscar_zoo.models.config_file import refuse_chosen_code
from oscar_zoo.models.loading import load_model, load_tokenizer
from oscar_zoo.models.model_source import inspect_model
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.artifact_model import check_served, check_used

KERNEL = "kernels-community/flash-attn"
CHOSEN: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("config.json", {"_attn_implementation": KERNEL}),
    "attention-public": ("config.json", {"attn_implementation": f"paged|{KERNEL}"}),
    "attention-inner": ("config.json", {"text_config": {"_attn_implementation": KERNEL}}),
    "attention-of-parts": ("config.json", {"_attn_implementation": {"vision_config": KERNEL}}),
    "experts": ("config.json", {"_experts_implementation": "someone/experts"}),
    "other-files": ("config.json", {"configuration_files": ["config.5.0.0.json"]}),
    "tokenizer-is-a-model": ("tokenizer_config.json", {"tokenizer_class": "Qwen3ForCausalLM"}),
    "tokenizer-is-any": ("tokenizer_config.json", {"tokenizer_class": "AutoTokenizer"}),
    "tokenizer-in-config": ("config.json", {"tokenizer_class": "pipeline"}),
    "processor": ("preprocessor_config.json", {"processor_class": "AutoModel"}),
    "image-processor": ("preprocessor_config.json", {"image_processor_type": "pipeline"}),
}


def changed(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """The example model with values added to one of its files."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    path = folder / name
    before = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps(before | values))
    return folder


@pytest.mark.parametrize("name", CHOSEN)
def test_a_folder_that_chooses_code_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = changed(tmp_path / "model", *CHOSEN[name])
    choice = ModelChoice(str(folder), "stranger/model", "model", None)
    file, values = CHOSEN[name]
    for door in (
        lambda: inspect_model(str(folder)),
        lambda: load_tokenizer(str(folder)),
        lambda: check_folder(folder, "stranger/model"),
        lambda: check_served(choice),
        lambda: check_used(choice),
    ):
        with pytest.raises(InvalidModel, match=file) as caught:
            door()
        assert next(iter(values)) in caught.value.message or "attn" in caught.value.message
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("value", ["flash_attention_2", "eager", "no_such_attention"])
def test_the_attention_of_a_model_is_ours(tmp_path: Path, value: str) -> None:
    folder = changed(tmp_path / "model", "config.json", {"_attn_implementation": value})
    loaded = load_model(str(folder), dtype="float32")
    assert loaded.model.config._attn_implementation == EXACT


def test_a_key_that_is_set_twice_is_seen_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        f'{{"_attn_implementation": "{KERNEL}", "_attn_implementation": "sdpa"}}'
    )
    with pytest.raises(InvalidModel):
        refuse_chosen_code(tmp_path, "a")


def test_deep_nesting_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(InvalidModel) as caught:
        refuse_chosen_code(tmp_path, "a")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("tokenizer_class", "Qwen2Tokenizer PreTrainedTokenizerFast TokenizersBackend"),
        ("tokenizer_class", "LlamaTokenizerFast GemmaTokenizer MistralCommonBackend"),
        ("processor_class", "Gemma3Processor Qwen3VLProcessor"),
        ("image_processor_type", "Gemma3ImageProcessor Qwen2VLImageProcessorFast"),
        ("feature_extractor_type", "WhisperFeatureExtractor Gemma3nAudioFeatureExtractor"),
        ("video_processor_type", "Qwen3VLVideoProcessor"),
    ],
)
def test_names_of_real_models_pass(tmp_path: Path, key: str, names: str) -> None:
    for name in names.split():
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: name}))
        refuse_chosen_code(tmp_path, "a")


def test_servers_import_no_code_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks transformers for such modules without a look at `--trust-remote-code`."""
    from transformers import dynamic_module_utils

    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Model: pass\n")
    modules = set_variables(device=None, kernels=tmp_path)["HF_MODULES_CACHE"]
    monkeypatch.syspath_prepend(str(tmp_path))  # what is added to sys.path goes after the test
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
    with pytest.raises(OSError, match="runs-no-code-of-a-model"):
        dynamic_module_utils.get_class_from_dynamic_module("evil.Model", str(tmp_path))
    assert not ran.exists()


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(
        tmp_path / "model",
        "config.json",
        {"model_type": "stranger", "auto_map": {"AutoConfig": "evil.Config"}},
    )
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("it asked"))
    with pytest.raises(UnsupportedModel, match="code that ships with a model is never run"):
        inspect_model(str(folder))
    assert load_tokenizer(str(folder)).is_fast  # by its tokenizer.json alone
    assert not ran.exists()
