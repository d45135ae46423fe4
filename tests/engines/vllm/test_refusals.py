"""What an INT2 cache in vLLM does not do is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oscar_zoo.engines.settings import ArtifactSource, PluginSettings
from oscar_zoo.engines.vllm import compat, refusals, register
from oscar_zoo.errors import UnsupportedModel, UsageError

CHOSEN = PluginSettings(source=ArtifactSource(folder="here"), origins={})
STATE, OTHER = (
    SimpleNamespace(mamba_type=SimpleNamespace(name=name)) for name in ("GDN_ATTN", "MAMBA2")
)
LAYER = SimpleNamespace(impl=SimpleNamespace(num_kv_heads=2, head_size=64, scale=0.125))


def config(**changes: Any) -> Any:
    sizes = (f"{one}_parallel_size" for one in ("pipeline", "data", "decode_context"))
    own = {name: changes.pop(name, 1) for name in sizes}
    usual: dict[str, Any] = dict.fromkeys(("speculative_config", "kv_transfer_config"))
    usual |= {"lora_config": None, "use_v2_model_runner": True}
    own_cache = bool(changes.pop("disable_hybrid_kv_cache_manager", False))
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=own_cache)
    model = SimpleNamespace(is_mm_prefix_lm=changes.pop("is_mm_prefix_lm", False))
    usual |= {"parallel_config": SimpleNamespace(**own), "scheduler_config": scheduler}
    usual["model_config"] = model
    return SimpleNamespace(**usual | changes)


def drafts(**others: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "num_speculative_tokens_per_batch_size": None,
        "enable_adaptive_verification": False,
    }
    usual |= {"method": others.pop("method", "ngram"), "kv_cache_dtype": "auto"}
    ngram = usual["method"] == "ngram"
    return {"speculative_config": SimpleNamespace(use_ngram=lambda: ngram, **usual | others)}


def test_what_works_is_not_refused() -> None:
    for changes in ({}, drafts(), drafts(method="eagle3")):
        refusals.check(config(**changes), {"a": LAYER, "b": LAYER}, [], CHOSEN)
    refusals.check(config(), {"a": LAYER}, [STATE], CHOSEN)


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        drafts(method="mtp"),
        drafts(method="eagle3", kv_cache_dtype="oscar_int2"),
        drafts(num_speculative_tokens_per_batch_size=[(1, 4)]),
        drafts(enable_adaptive_verification=True),
        {"disable_hybrid_kv_cache_manager": True},
        {"is_mm_prefix_lm": True},
        {"kv_transfer_config": object()},
        {"lora_config": object()},
        {"use_v2_model_runner": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_of_vllm(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        refusals.check(config(**changes), {"a": LAYER}, [], CHOSEN)


def test_states() -> None:
    for states, changes in ([OTHER], {}), ([STATE], drafts()):
        with pytest.raises(UsageError):
            refusals.check(config(**changes), {"a": LAYER}, states, CHOSEN)


def test_layers_with_other_heads() -> None:
    other = SimpleNamespace(impl=SimpleNamespace(num_kv_heads=1, head_size=64, scale=0.125))
    with pytest.raises(UnsupportedModel):
        refusals.check(config(), {"a": LAYER, "b": other}, [], CHOSEN)


@pytest.mark.parametrize("asked", [False, True])
def test_another_release_ends_only_who_asks(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.34.1")
    monkeypatch.setattr("sys.argv", ["vllm", "--kv-cache-dtype", "oscar_int2"][: 3 * asked])
    if asked:
        with pytest.raises(SystemExit):
            register.register()
    else:
        register.register()


def test_a_function_is_replaced_where_a_base_has_it() -> None:
    """As that of vLLM's CUDA platform: a model with another cache must get what it got before."""

    class Base:
        @classmethod
        def choose(cls, one: int, two: int) -> tuple[Any, int, int]:
            return cls, one, two

    class Platform(Base):
        pass

    def passing(stock: Any) -> Any:
        def then(*given: Any, **named: Any) -> Any:
            return stock(*given, **named)

        return then

    for _ in range(2):
        compat.replaced(Platform, "choose", passing)
    assert Platform.choose(1, two=2) == Platform().choose(1, 2) == (Platform, 1, 2)
    assert Base.choose(1, 2) == (Base, 1, 2)
