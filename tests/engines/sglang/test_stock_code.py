"""What SGLang's own code does with ours, called without a server, on every release: names that
moved, graphs before any request, layers and states of models, kernels that stand in for others, and
what hybrid models need on a GPU as far as it shows without one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_calls import CLASSES
from engines import INSTALLED, RELEASES, Engines, needs_sglang

from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.models.geometry import model_block
from oscar_zoo.models.other_layers import STATES_PER_REQUEST
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe, config_of_recipe, others_of_recipe

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]


@pytest.fixture(scope="module", params=RELEASES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"), request.param)
    yield runs
    runs.close()


def test_the_table_of_releases_is_true(engines: Engines) -> None:
    place = RELEASES.index(engines.release)
    rows = (releases.RESOLVE, releases.ALLOCATE_ROWS)
    wanted = [row.new if place >= RELEASES.index(row.since) else row.old for row in rows]
    assert engines.call("engine_calls:names") == wanted


@pytest.mark.parametrize("engines", [INSTALLED], indirect=True)
def test_passes_before_any_request(engines: Engines) -> None:
    """Hooks on request rows have seen nothing yet when a graph is captured; a replay wants to know
    that they run. SGLang tunes FlashInfer's experts with a pass of padding rows; rows of requests
    stay refused."""
    graph = ["begin decode", "ServerFailed", "refill decode"]
    assert engines.call("engine_calls:decode_graph") == graph
    assert engines.call("engine_calls:eager_warm_up") == ["begin decode", "ServerFailed"]


WIDTHS = [(512, 512), (96, 96), (192, 96)]


def test_prefill_by_triton_is_plain_attention(engines: Engines) -> None:
    """For heads that FlashInfer does not have, fed as Gemma 4 needs it: parts over new tokens and
    over cached ones, and their log-sum-exps."""
    found = engines.call("engine_calls:differences", widths=WIDTHS)
    for widths, differences in zip(WIDTHS, found, strict=True):
        assert max(differences) < 1e-4, widths


def test_plain_convolutions_give_what_the_kernels_give(engines: Engines) -> None:
    """Prefill behind a state and without one, of sequences shorter than the states, and decoding;
    padding writes nothing."""
    found = engines.call("plain_convolutions:compare")
    assert len(found) == 8 and max(found.values()) < 1e-5, found


COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
LINEAR: dict[str, Any] = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1}
EVERY_SECOND = {"full_attention_interval": 2}
"""In the published files of these models; transformers does not write it again."""
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", LINEAR, EVERY_SECOND),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", LINEAR, EVERY_SECOND),
    "Lfm2ForCausalLM": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, {}),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "attention"] * 2, "mamba_d_state": 16, **MAMBA},
        {},
    ),
    "FalconH1ForCausalLM": (
        "FalconH1Config",
        {"head_dim": 64, "mamba_d_ssm": 512, "mamba_d_state": 16, **MAMBA},
        {},
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {
            "head_dim": 64,
            "layers_block_type": ["mamba", "attention"] * 2,
            "hybrid_override_pattern": "M*M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 16,
        },
        {},
    ),
}
"""By architecture: class of the configuration, its values, and what published files say besides."""


def write_config(folder: Path, architecture: str) -> list[Any]:
    """A model's folder without weights; returns what `compute` makes of it."""
    import transformers

    name, values, published = FAMILIES[architecture]
    config = getattr(transformers, name)(**{**COMMON, **values})
    config.architectures = [architecture]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | published))
    block = model_block(config, model_id=architecture, revision=None, config_sha256="0" * 64)
    return [list(block.attention_layers), block.num_kv_heads, block.head_dim, block.v_head_dim]


def test_compute_and_server_name_the_same_layers(engines: Engines, tmp_path: Path) -> None:
    """`compute` finds the full-attention layers in the configuration of transformers, and a worker
    in that of SGLang."""
    wanted = {name: write_config(tmp_path / name, name) for name in FAMILIES}
    folders = {name: str(tmp_path / name) for name in FAMILIES}
    found = engines.call("engine_calls:full_layers", folders=folders)
    assert found == wanted
    for name, (layers, *_) in found.items():
        assert layers == ([0, 1, 2, 3] if name == "FalconH1ForCausalLM" else [1, 3]), name


WORDS = {
    "granitemoehybrid": ("attention", "mamba"),
    "lfm2": ("full_attention", "conv"),
    "lfm2_moe": ("full_attention", "conv"),
}
"""What files of a type call layers with attention, and the others."""


def as_published(recipe: ModelRecipe) -> dict[str, Any]:
    """The configuration of a recipe in the words of the files that SGLang reads."""
    values = config_of_recipe(recipe).as_written
    kind, shape = recipe.model_type, recipe.geometry
    if kind in WORDS:
        full, other = WORDS[kind]
        layers = range(shape.num_layers)
        values["layer_types"] = [full if i in shape.attention_layers else other for i in layers]
    if kind == "falcon_h1":
        del values["layer_types"]
        values["mamba_d_ssm"] = values["mamba_n_heads"] * values["mamba_d_head"]
    if kind.startswith("qwen3"):
        values["full_attention_interval"] = 4
    return values


def test_the_states_of_the_zoo_are_those_of_sglang(engines: Engines) -> None:
    recipes = [one for one in Catalog.packaged().recipes() if one.model_type in CLASSES]
    configs = {one.name: as_published(one) for one in recipes}
    found = engines.call("engine_calls:state_bytes", configs=configs)
    assert len(found) == len(recipes) > 15
    for recipe in recipes:
        others = others_of_recipe(recipe)
        assert others is not None and others.state is not None
        assert others.state == STATES_PER_REQUEST * found[recipe.name][0], recipe.name
    assert found["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"][1] == 23  # the other 23 are experts
    states, layers = found["Qwen3-Next-80B-A3B-Instruct"]
    assert (states // 10**6, layers) == (77, 36)


def case(prefix: int, *passes: int, branch: int | None = None) -> dict[str, Any]:
    given = {"length": passes[-1], "passes": passes, "prefix": prefix, "branch": branch}
    return {**given, "recent": 256}


CASES = {
    "one pass": (case(0, 1000), [704]),
    "behind a hit": (case(640, 1000), [704]),
    "in the second of two passes": (case(0, 512, 1000), [512, 704]),
    "in the first of two passes": (case(0, 960, 1000), [704, None]),
    "a branch that was found stays": (case(0, 1000, branch=320), [320]),
    "a prompt that ends too soon": (case(704, 900), [896]),
}
OFF_GRID = case(0, 500, 1000)


def test_a_state_is_saved_early_enough_for_a_hit(engines: Engines) -> None:
    """One that leaves the recent window to prefill. The scheduler says what it makes of the place
    that we name."""
    cases = [asked for asked, _ in CASES.values()]
    found = engines.call("engine_calls:saved_places", cases=[*cases, OFF_GRID])
    assert dict(zip(CASES, found, strict=False)) == {name: x for name, (_, x) in CASES.items()}
    # Before 0.5.21 a place must be a multiple of the step, so none is named for the second pass.
    assert found[-1] == ([448, 948] if engines.release == "0.5.17" else [448, 692])


def test_our_backend_goes_beside_linear_attention_on_blackwell(engines: Engines) -> None:
    said = engines.call("engine_calls:wrapped")
    assert said["ours"] == ["full", "linear", [1, 3]]
    assert "backends are supported on Blackwell" in said["without"]
    assert said["names"] == ["oscar_int2"] * 3
