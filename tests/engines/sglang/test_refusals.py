"""Refusals: each row is hit by the configuration it is about, and its sentence says what and why.

First with plain objects, then with what the installed SGLang makes of a command line, a model and
an attention layer.
"""

import json
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import environment, needs_sglang
from forked_commands import forked
from sglang_forks import shared
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.engines.setting_flags import BACKEND
from oscar_zoo.engines.sglang import refusals
from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.engines.sglang.launch import user_flags
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags, check_flags
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models.config_file import ConfigFile

NORMAL: dict[str, Any] = {
    "attention_backend": BACKEND,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "dcp_size": 1,
    "device": "cuda",
    "cuda_graph_config": SimpleNamespace(
        decode=SimpleNamespace(backend="disabled"), prefill=SimpleNamespace(backend="disabled")
    ),
}


def graphs(decode: str, prefill: str) -> SimpleNamespace:
    return SimpleNamespace(
        decode=SimpleNamespace(backend=decode), prefill=SimpleNamespace(backend=prefill)
    )


SWITCHES = (
    "--speculative-adaptive --enable-lmcache --enable-flexkv"
    " --enable-unified-cache-external-linker --enable-hisparse --enable-kv-cache-sharding"
    " --enable-unified-memory --enable-page-major-kv-layout --enable-memory-saver --enable-pdmux"
    " --enable-two-batch-overlap --enable-streaming-session --enable-prefill-cp"
    " --prefill-only-disable-kv-cache --enable-mis --enable-http2 --enable-nvidia-megakernel"
).split()
NGRAM = {"speculative_algorithm": "NGRAM"}
SERVER_CASES: dict[str, dict[str, Any]] = {
    **{flag: {flag[2:].replace("-", "_"): True} for flag in SWITCHES},
    "--attention-backend": {"attention_backend": "flashinfer"},
    "--speculative-algorithm": {"speculative_algorithm": "DFLASH"},
    "--speculative-num-draft-tokens": {"speculative_num_draft_tokens": 33},
    "--speculative-draft-attention-backend": {"speculative_draft_attention_backend": BACKEND},
    "--enable-multi-layer-eagle": {"enable_multi_layer_eagle": True, "speculative_eagle_topk": 2},
    "--enable-linear-replayssm-spec": {"enable_linear_replayssm_spec": True, **NGRAM},
    "--pp-size": {"pp_size": 2, **NGRAM},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True, **NGRAM},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True, **NGRAM},
    "--page-size": {"page_size": 8, "enable_hierarchical_cache": True},
    "--disable-radix-cache": {"disable_radix_cache": True, "enable_hierarchical_cache": True},
    "--hicache-storage-backend": {"hicache_storage_backend": "file"},
    "--hicache-host-memory-mode": {"hicache_host_memory_mode": "buffer_only"},
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--radix-cache-backend": {"radix_cache_backend": "another"},
    "--dcp-size": {"dcp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--tokenizer-worker-num": {"tokenizer_worker_num": 2},
    "--kv-canary": {"kv_canary": "log"},
    "--cuda-graph-backend-prefill full": {"cuda_graph_config": graphs("disabled", "full")},
}
HOST = {"enable_hierarchical_cache": True}
DISK_CASES: dict[str, dict[str, Any]] = {
    "a disk cache without --enable-hierarchical-cache": {},
    "a disk cache with another --hicache-storage-backend": {
        **HOST,
        "hicache_storage_backend": "mooncake",
    },
    "a disk cache on several GPUs": {**HOST, "tp_size": 2},
    "a disk cache with --enable-lora": {**HOST, "lora_paths": ["a=b"]},
}
MLA = "MLA in a model other than DeepSeek V2, V3 and GLM-4.7-Flash"
MODEL_CASES = {
    MLA: {
        "attention_arch": SimpleNamespace(name="MLA"),
        "hf_text_config": SimpleNamespace(model_type="minicpm3"),
    },
    "KV shared between layers": {"hf_text_config": SimpleNamespace(num_kv_shared_layers=2)},
    "--enable-multimodal with Gemma": {
        "is_multimodal": True,
        "hf_config": SimpleNamespace(model_type="gemma3"),
    },
    "an encoder-decoder model": {"is_encoder_decoder": True},
    "chunked local attention": {"attention_chunk_size": 8192},
    "sparse attention with an index": {"hf_text_config": SimpleNamespace(indexer_n_heads=4)},
}
LATENT_CASES = {
    "MLA with --dp-size or --pp-size": {"dp_size": 2},
    "MLA with drafts": {"speculative_algorithm": "NGRAM"},
    "MLA with --enable-hierarchical-cache": {"enable_hierarchical_cache": True},
}
LAYER_CASES = {
    "sliding_window_size": {"sliding_window_size": 127},
    "xai_temperature_len": {"xai_temperature_len": 1024},
    "cross attention": {"is_cross_attention": True},
    "attention that is not causal": {"attn_type": SimpleNamespace(value="encoder_only")},
}


SINCE = {
    "--enable-kv-cache-sharding": (0, 5, 23),
    "--enable-nvidia-megakernel": (0, 5, 23),
    "--enable-unified-cache-external-linker": (0, 5, 21),
    "--hicache-host-memory-mode": (0, 5, 21),
}
"""Flags that the oldest supported SGLang does not have yet."""

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(("hidden_size", "head_dim", "intermediate_size"), 64),
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
LONGCAT = {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"}
MODELS = {"": QWEN3, MLA: {**QWEN3, **LONGCAT, **dict.fromkeys(LATENT, 16)}}
SLIDING_CASES = {
    "a layer that has no sliding window, although config.json says so,": {"sliding_window_size": -1}
}


ON_CPU = {"device": "cpu", "tp_size": 1, "dp_size": 1, "pp_size": 1}


def server(config: Any) -> None:
    refusals.check_server(config, {}, eager_only=False)


def on_disk(config: Any) -> None:
    refusals.check_server(config, {refusals.DISK: "/prompts"}, eager_only=False)


TABLES: tuple[tuple[Any, dict[str, Any], Any, dict[str, Any]], ...] = (
    ((*refusals.SERVER, refusals.STORAGE), SERVER_CASES, server, NORMAL),
    (refusals.ON_DISK[:-1], DISK_CASES, on_disk, NORMAL),
    (refusals.MODEL, MODEL_CASES, refusals.check_model, {}),
    (refusals.LATENTS, LATENT_CASES, lambda args: refusals.check_latents(args, None), ON_CPU),
    (refusals.LAYER, LAYER_CASES, lambda layer: refusals.check_attention([layer]), {}),
    (refusals.SLIDING, SLIDING_CASES, lambda layer: refusals.check_sliding_layers([layer]), {}),
)


@pytest.mark.parametrize(("rows", "cases", "check", "normal"), TABLES)
def test_each_row_refuses_what_it_is_about(
    rows: Any, cases: dict[str, Any], check: Any, normal: dict[str, Any]
) -> None:
    assert {row.name for row in rows} == set(cases)
    for row in rows:
        with pytest.raises((UsageError, UnsupportedModel)) as caught:
            check(SimpleNamespace(**{**normal, **cases[row.name]}))
        assert caught.value.message == row.sentence and len(row.reason) > 10
        assert caught.value.hint == f"instead: {row.instead}"
        # `oscar-zoo serve` takes no other KV cache after `--`, so that has a command of its own.
        stock = "python -P -m sglang.launch_server --model-path"
        assert "--kv-cache-dtype" not in row.instead or stock in row.instead


def argv(name: str, attributes: dict[str, Any]) -> list[str]:
    """The flags of a case: that of its row, then those without which the row does not hold."""
    (_, value), *others = attributes.items()
    also = [
        word
        for other, one in others
        for word in (f"--{other.replace('_', '-')}", *([] if one is True else [str(one)]))
    ]
    return [*name.split(), *([] if value is True or " " in name else [str(value)]), *also]


ROWS = [row for row in refusals.SERVER if row.name != "--disaggregation-mode"]
"""All but the flag that `serve` takes from nobody."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_found_in_every_spelling(row: refusals.Refusal) -> None:
    flag, *more = argv(row.name, SERVER_CASES[row.name])
    spellings = [[flag, *more]]
    if more and not more[0].startswith("--"):
        names = (flag, f"--{flag[2:].replace('-', '_')}")
        spellings += [[f"{one}={more[0]}", *more[1:]] for one in names]
    for words in spellings:
        with pytest.raises(UsageError) as caught:
            check_flags(UserFlags(["--tp=2", *words]), "cuda")
        assert caught.value.message == row.sentence and caught.value.hint


@pytest.mark.parametrize(("other", "flag"), user_flags.OTHER_NAMES.items())
def test_second_names_are_found(other: str, flag: str) -> None:
    words = [other if word == flag else word for word in argv(flag, SERVER_CASES[flag])]
    with pytest.raises(UsageError):
        check_flags(UserFlags(words), "cuda")


def test_an_ordinary_server_passes() -> None:
    refusals.check_server(SimpleNamespace(**NORMAL), {}, eager_only=True)
    refusals.check_server(SimpleNamespace(), {}, eager_only=True)
    refusals.check_model(
        SimpleNamespace(attention_arch=SimpleNamespace(name="MHA"), is_hybrid_swa=False)
    )
    decoder = SimpleNamespace(
        sliding_window_size=-1,
        logit_cap=0.0,
        xai_temperature_len=-1,
        attn_type=SimpleNamespace(value="decoder"),
    )
    refusals.check_attention([decoder, SimpleNamespace()])


@pytest.mark.parametrize(("release", "refused"), [("0.5.17", True), ("0.5.21", False)])
def test_files_need_a_salt(release: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "version", lambda _: release)
    config = SimpleNamespace(**NORMAL | HOST, hicache_storage_backend=refusals.STORAGE_BACKEND)
    with pytest.raises(UsageError, match=r"0\.5\.21") if refused else nullcontext():
        on_disk(config)


def test_sliding_windows_have_one_size() -> None:
    layers = [SimpleNamespace(sliding_window_size=size) for size in (7, 7, 8)]
    refusals.check_sliding_layers(layers[:2])
    with pytest.raises(UnsupportedModel):
        refusals.check_sliding_layers(layers)


def test_plain_ops_refuse_cuda_graphs_and_only_on_a_gpu() -> None:
    config = SimpleNamespace(**{**NORMAL, "cuda_graph_config": graphs("full", "disabled")})
    refusals.check_server(config, {}, eager_only=False)
    with pytest.raises(UsageError, match="CUDA graphs"):
        refusals.check_server(config, {}, eager_only=True)
    config.device = "cpu"
    refusals.check_server(config, {}, eager_only=True)


@pytest.mark.parametrize("name", refusals.ENVIRONMENT)
def test_environment_rows(name: str) -> None:
    for off in ("on", "false", "0", ""):  # as SGLang reads them
        refusals.check_server(SimpleNamespace(**NORMAL), {name: off}, eager_only=False)
    with pytest.raises(UsageError) as caught:
        refusals.check_server(SimpleNamespace(**NORMAL), {name: "true"}, eager_only=False)
    assert caught.value.hint == f"unset {name}"


def model_folder(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """What is said to the command lines, models and layers of the installed SGLang."""
    folder = tmp_path_factory.mktemp("refusals")

    def plain(attributes: dict[str, Any]) -> dict[str, Any]:
        return {name: getattr(value, "value", value) for name, value in attributes.items()}

    cases = {
        "flags": {"": [], **{name: argv(name, given) for name, given in SERVER_CASES.items()}},
        "models": {
            name: model_folder(folder / str(i), config)
            for i, (name, config) in enumerate(MODELS.items())
        },
        "layers": {"": {}, **{name: plain(attributes) for name, attributes in LAYER_CASES.items()}},
    }
    out, log = folder / "out.json", folder / "log"
    env = {"SGLANG_PLUGINS": "none"}
    code = shared().call("engine_calls:collect", folder, log, env, cases=cases, out=str(out))
    assert code == 0, log.read_text()[-2000:]
    said: dict[str, dict[str, str | None]] = json.loads(out.read_text())
    return said


@needs_sglang
@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["flags", "models", "layers"])
def test_what_sglang_makes_of_it_is_refused_by_name(
    installed: dict[str, dict[str, str | None]], kind: str
) -> None:
    number = tuple(map(int, version("sglang").split(".")[:3]))
    for name, said in installed[kind].items():
        if number < SINCE.get(name, number):
            assert said is None
        else:
            assert said is not None, f"this SGLang has no {name}"
            assert (
                said.startswith(f"{name} does not work with an INT2 KV cache: ")
                if name
                else said == ""
            )


@needs_sglang
@pytest.mark.sglang
def test_a_model_is_refused_before_its_weights_are_loaded(tmp_path: Path) -> None:
    """There are none to load: the folder holds nothing but the configuration."""
    rotations = write_folder(tmp_path / "rotations", artifact_files())
    model = model_folder(tmp_path / "model", MODELS[MLA])
    flags = {
        "model-path": model,
        "kv-cache-dtype": "int2",
        "oscar-rotation-path": rotations,
        "device": "cpu",
    }
    command = ["-m", "sglang.launch_server", "--skip-tokenizer-init", "--disable-cuda-graph"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = forked(command, environment(SGLANG_PLUGINS="oscar"), tmp_path)
    assert done.code == 1 and "Traceback" not in done.err
    assert f"\nerror: {MLA} does not work with an INT2 KV cache: " in done.err


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"model_type": "deepseek_v2"}, True),
        ({"kv_lora_rank": 128, "num_attention_heads": 128}, True),
        ({"kv_lora_rank": 64}, False),
        ({"num_attention_heads": 256}, False),
        ({"model_type": "minicpm3"}, False),
        ({"index_topk": 2048}, False),
    ],
    ids=str,
)
def test_latents_that_a_kernel_reads_are_served(
    tmp_path: Path, change: dict[str, Any], served: bool
) -> None:
    """By `oscar-zoo serve`, as far as `config.json` tells."""
    rows = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "architectures": ["Any"]}
    values = {**QWEN3, "model_type": "deepseek_v3", **rows, **change}
    config = ConfigFile.of_folder(Path(model_folder(tmp_path / "model", values)))
    with nullcontext() if served else pytest.raises(UnsupportedModel):
        refusals.check_config(config, "a model")


@pytest.mark.parametrize("others", ["states", "windows"])
def test_latents_are_alone_in_a_model(others: str) -> None:
    refusals.check_latents(SimpleNamespace(**ON_CPU), None)
    with pytest.raises(UnsupportedModel, match=others):
        refusals.check_latents(SimpleNamespace(**ON_CPU), others)
    refusals.check_latents(SimpleNamespace(**ON_CPU), None, (2, 4))
    with pytest.raises(UnsupportedModel, match="codes of 2 bits"):
        refusals.check_latents(SimpleNamespace(**ON_CPU | {"device": "cuda"}), None, (2, 4))


@pytest.mark.parametrize("others", ["states", "windows"])
def test_layers_that_keep_something_else_bring_nothing_back_from_the_host(others: str) -> None:
    host = SimpleNamespace(enable_hierarchical_cache=True, pp_size=1)
    refusals.check_layers(host, None)
    with pytest.raises(UnsupportedModel):
        refusals.check_layers(host, others)
    host.pp_size = 2
    with pytest.raises(UsageError):
        server(host)


@pytest.mark.parametrize(
    ("algorithm", "others", "flag"),
    [
        ("NEXTN", "windows", "--speculative-eagle-topk"),
        ("NEXTN", "states", "--speculative-eagle-topk"),
        ("NGRAM", "states", "--speculative-ngram-max-bfs-breadth"),
        ("NGRAM", "windows", "--speculative-ngram-max-bfs-breadth"),
    ],
)
def test_drafts_beside_layers_that_keep_other_rows(algorithm: str, others: str, flag: str) -> None:
    """SGLang chooses the branches of a tree where none are named, so these models need the
    flag."""
    refusals.check_layers(SimpleNamespace(), others)
    refusals.check_layers(SimpleNamespace(speculative_algorithm=algorithm), None)
    for given in ({}, {flag[2:].replace("-", "_"): 10}):
        with pytest.raises(UnsupportedModel) as caught:
            refusals.check_layers(SimpleNamespace(speculative_algorithm=algorithm, **given), others)
        assert f"{flag}=1" in str(caught.value.hint)
    chain = {flag[2:].replace("-", "_"): 1}
    refusals.check_layers(SimpleNamespace(speculative_algorithm=algorithm, **chain), others)
