"""What the INT2 cache does not support, refused by name: one table of rows for each thing that is
looked at, from the `config.json` before a start to the layers of the loaded model. Needs neither
torch nor sglang.

Rows read plain attributes. One that a SGLang version does not have counts as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oscar_zoo.engines.sglang.setting_flags import BACKEND
from oscar_zoo.errors import OscarZooError, UnsupportedModel, UsageError
from oscar_zoo.models import geometry
from oscar_zoo.models.config_file import ConfigFile, check_cache

Uses = Callable[[Any], bool]
STOCK = "without INT2, python -P -m sglang.launch_server --model-path ... --kv-cache-dtype auto"
"""Advice for a model that cannot have an INT2 cache; `oscar-zoo serve` starts no other servers."""
BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
FORK_BACKENDS = ("fa3", "triton")
"""Backends of the published fork for prefill and decode, which compute the same attention. The
plugin replaces them by its own backend, with a note. Other backends are refused."""
SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Algorithms whose drafts are a chain or a tree that the target verifies in one step."""
MOST_DRAFTS = 32
"""`oscar_kernels.cache.MOST_DRAFTS`, which needs torch."""
BREADTH, BRANCHES = "--speculative-ngram-max-bfs-breadth", "--speculative-eagle-topk"
"""The flags by which drafts are a chain or a tree."""
TEXT_ONLY = ("gemma3", "gemma4", "gemma4_unified")
"""Model types with images that are served with text alone."""
OWN_CODE = ("mimo_v2", "mimo_v2_flash")
"""Model types that SGLang reads with the configuration class of the checkpoint alone, or that it
reads wrongly with the class of transformers."""


@dataclass(frozen=True)
class Refusal:
    """One row: `uses` looks at a configuration, and the three texts make up the message."""

    name: str
    uses: Uses
    reason: str
    instead: str

    @property
    def sentence(self) -> str:
        """The message without the hint."""
        return f"{self.name} does not work with an INT2 KV cache: {self.reason}."


def check_config(config: ConfigFile, model_id: str) -> None:
    """Refuse a model by its `config.json`, before SGLang reads it; the part about the language
    model comes first. What `compute` and `eval` refuse is refused here in the same sentence."""
    check_cache(config, model_id)
    for part in (config.get_text_config(), config):
        check_rows(part, CONFIG + MISREAD, UnsupportedModel)
    check_rows(config, WHOLE, UnsupportedModel)
    if _is_a(*OWN_CODE)(config):
        raise UnsupportedModel(
            f"SGLang reads the configuration of {model_id} ({config.model_type}) with code that"
            " ships with the model, which oscar-zoo serve never runs.",
            hint="if you trust that code: python -P -m sglang.launch_server --model-path ..."
            " --trust-remote-code --kv-cache-dtype int2 --oscar-artifact NAME",
        )
    if not getattr(config, "architectures", None):
        raise UnsupportedModel(
            f"the config.json of {model_id} has no architectures, and SGLang chooses by them.",
            hint='add them as the model has them on its hub: "architectures": ["..."]',
        )


def check_server(config: Any, environ: Mapping[str, str], *, eager_only: bool) -> None:
    """Refuse a server by its resolved arguments and its environment."""
    check_rows(config, (*SERVER, EAGER) if eager_only else SERVER, UsageError)
    for name, reason in ENVIRONMENT:
        if environ.get(name, "").lower() in TRUE:
            raise UsageError(
                f"{name} does not work with an INT2 KV cache: {reason}.", hint=f"unset {name}"
            )


def check_model(config: Any) -> None:
    check_rows(config, MODEL, UnsupportedModel)


def check_layers(config: Any, others: str | None) -> None:
    """Refuse trees of drafts for a model whose other layers verify chains alone. `others`: what
    layers without full attention keep; see `geometry.other_layers`."""
    if not _algorithm(config) or others is None:
        return
    flag = BREADTH if _algorithm(config) == "NGRAM" else BRANCHES
    if getattr(config, _attribute(flag), None) != 1:
        raise UnsupportedModel(
            "a tree of drafts does not work with an INT2 KV cache of this model, because"
            f" {NO_TREES[others]}.",
            hint=f"use a chain: {flag}=1",
        )


def has_draft_model(config: Any) -> bool:
    """Whether another model, or a layer of the model, makes the drafts."""
    return _algorithm(config) not in ("", "NGRAM")


def check_attention(layers: Iterable[Any]) -> None:
    """Refuse a model by the full-attention layers it was built from."""
    for layer in layers:
        check_rows(layer, LAYER, UnsupportedModel)


def check_sliding_layers(layers: Iterable[Any]) -> None:
    """Refuse a model by its layers in the pool for sliding windows."""
    found = list(layers)
    for layer in found:
        check_rows(layer, SLIDING, UnsupportedModel)
    if len({layer.sliding_window_size for layer in found}) > 1:
        raise UnsupportedModel(
            "a model with sliding windows of different sizes does not work with an INT2 KV cache:"
            " SGLang reads the same number of tokens in all of its layers with a window.",
            hint=f"instead: {STOCK}",
        )


def check_rows(config: Any, rows: Iterable[Refusal], error: type[OscarZooError]) -> None:
    """Raise `error` for the first row that `config` uses."""
    for row in rows:
        if row.uses(config):
            raise error(row.sentence, hint=f"instead: {row.instead}")


# How rows look at a configuration.


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def is_set(name: str) -> Uses:
    return lambda config: bool(getattr(config, name, None))


def other_than(name: str, *allowed: object) -> Uses:
    return lambda config: getattr(config, name, None) not in (None, *allowed)


def above(name: str, limit: float) -> Uses:
    return lambda config: (getattr(config, name, None) or limit) > limit


def _inside(part: str, uses: Uses) -> Uses:
    """The same of a part of a configuration."""
    return lambda config: uses(getattr(config, part, None))


def _and(*all_of: Uses) -> Uses:
    return lambda config: all(uses(config) for uses in all_of)


def _is_a(*model_types: str) -> Uses:
    return lambda config: getattr(config, "model_type", None) in model_types


def _has(name: str, *kinds: str) -> Uses:
    """Whether the value `name` is set, or a layer is of one of `kinds`."""

    def uses(config: Any) -> bool:
        layers = set(getattr(config, "layer_types", None) or ())
        return bool(getattr(config, name, None)) or bool(layers & set(kinds))

    return uses


def _lacks(name: str, *model_types: str) -> Uses:
    return lambda config: _is_a(*model_types)(config) and getattr(config, name, None) is None


def _rotated_otherwise(read: str | None, usual: float, *model_types: str) -> Uses:
    """Whether SGLang rotates by another base than the file says. `read`: the value that SGLang
    takes, or `None` where it takes `usual` whatever the file says."""

    def uses(config: Any) -> bool:
        taken = getattr(config, read or "", None) or usual
        given = getattr(config, "rope_parameters", None) or {}
        said = given.get("rope_theta") or getattr(config, "rope_theta", None) or taken
        return _is_a(*model_types)(config) and float(said) != float(taken)

    return uses


def _algorithm(config: Any) -> str:
    return str(getattr(config, "speculative_algorithm", None) or "").upper()


def _drafts_by(*names: str) -> Uses:
    return lambda config: _algorithm(config) in names


def _speculative(config: Any) -> bool:
    return bool(_algorithm(config))


def _graphs(phase: str, *allowed: str) -> Uses:
    """Whether a GPU server captures graphs of a phase by a backend that is not `allowed`."""

    def uses(config: Any) -> bool:
        settings = getattr(getattr(config, "cuda_graph_config", None), phase, None)
        backend = getattr(settings, "backend", None)
        if backend is None or getattr(config, "device", None) == "cpu":
            return False
        return str(getattr(backend, "value", backend)).lower() not in allowed

    return uses


def _flag(name: str, reason: str, instead: str, uses: Uses | None = None) -> Refusal:
    """A flag of SGLang; by default it is refused where it is set."""
    return Refusal(name, uses or is_set(_attribute(name)), reason, instead)


# The rows.

CHAINS = f"--speculative-algorithm {' or '.join(SERVED)}"
COPIES = "it copies slots out of the pool"
OWN_CACHE = "SGLang's own prefix cache"

SERVER = (
    _flag(
        "--attention-backend",
        f"only the backend {BACKEND} can read these slots",
        "leave --attention-backend, --prefill-attention-backend and --decode-attention-backend"
        f" out, or say {BACKEND}",
        lambda config: any(other_than(name, BACKEND)(config) for name in BACKENDS),
    ),
    Refusal(
        "--speculative-algorithm FROZEN_KV_MTP",
        _drafts_by("FROZEN_KV_MTP"),
        "its draft model reads the slots of the target",
        CHAINS,
    ),
    Refusal(
        "--speculative-algorithm DFLASH",
        _drafts_by("DFLASH"),
        "its draft model writes blocks into a cache that is sized like the target's",
        CHAINS,
    ),
    Refusal(
        "--speculative-algorithm DSPARK",
        _drafts_by("DSPARK"),
        "it verifies another number of drafts of each request",
        CHAINS,
    ),
    _flag(
        "--speculative-algorithm",
        "nobody has tested it",
        CHAINS,
        lambda config: not _drafts_by("", *SERVED)(config),
    ),
    _flag(
        "--speculative-adaptive",
        "it changes the number of drafts, which the rings are sized for",
        "--speculative-num-draft-tokens",
    ),
    _flag(
        "--speculative-num-draft-tokens",
        f"a step verifies {MOST_DRAFTS} drafts of a request at most",
        f"--speculative-num-draft-tokens {MOST_DRAFTS}",
        above("speculative_num_draft_tokens", MOST_DRAFTS),
    ),
    _flag(
        "--speculative-draft-attention-backend",
        "the cache of the draft model is SGLang's own",
        "--speculative-draft-attention-backend flashinfer",
        lambda config: getattr(config, "speculative_draft_attention_backend", None) == BACKEND,
    ),
    _flag(
        "--enable-multi-layer-eagle",
        "trees of several draft layers were never tested",
        "--speculative-eagle-topk 1",
        _and(is_set("enable_multi_layer_eagle"), above("speculative_eagle_topk", 1)),
    ),
    _flag(
        "--enable-linear-replayssm-spec",
        "nobody has tested it",
        "leave it out",
        _and(_speculative, is_set("enable_linear_replayssm_spec")),
    ),
    _flag(
        "--pp-size",
        "with drafts the stages of a pipeline would commit at different times",
        "--tp-size, or no drafts",
        _and(_speculative, above("pp_size", 1)),
    ),
    _flag(
        "--enable-mixed-chunk",
        "a step has either prompts or drafts",
        "leave it out with drafts",
        _and(_speculative, is_set("enable_mixed_chunk")),
    ),
    _flag(
        "--disaggregation-mode",
        "prefill and decode servers would have to send rings and sinks as well",
        "one server for prefill and decode",
        other_than("disaggregation_mode", "null"),
    ),
    _flag(
        "--enable-hierarchical-cache",
        "host copies of slots would lose their scales",
        "the prefix cache on the device",
    ),
    _flag("--enable-lmcache", COPIES, OWN_CACHE),
    _flag("--enable-flexkv", COPIES, OWN_CACHE),
    _flag("--enable-unified-cache-external-linker", COPIES, OWN_CACHE),
    _flag(
        "--radix-cache-backend",
        "another prefix cache may not leave the recent window to prefill",
        OWN_CACHE,
    ),
    _flag("--enable-hisparse", "it keeps other slots on the host", "a dense cache"),
    _flag("--enable-kv-cache-sharding", "it needs another pool layout", "tensor parallelism"),
    _flag(
        "--enable-unified-memory",
        "slots of the shared pool have no room for codes and scales",
        "separate pools, the default",
    ),
    _flag("--enable-page-major-kv-layout", "codes are stored per layer", "the default layout"),
    _flag(
        "--enable-memory-saver",
        "releasing the pool would lose rings and sinks",
        "restart the server to free its memory",
    ),
    _flag("--enable-pdmux", "two streams would write one ring", "chunked prefill"),
    _flag(
        "--enable-two-batch-overlap",
        "two half batches would write one ring",
        "one batch at a time",
    ),
    _flag(
        "--enable-streaming-session",
        "it keeps slots of a request beyond the life of its ring",
        "the prefix cache, which reuses earlier turns",
    ),
    _flag("--dcp-size", "each rank would hold part of a ring", "--tp-size", above("dcp_size", 1)),
    _flag(
        "--attn-cp-size",
        "each rank would see part of a prompt",
        "--tp-size",
        above("attn_cp_size", 1),
    ),
    _flag("--enable-prefill-cp", "each rank would see part of a prompt", "--tp-size"),
    _flag(
        "--dllm-algorithm",
        "diffusion models rewrite tokens that are already cached",
        "a causal model",
    ),
    _flag("--prefill-only-disable-kv-cache", "there would be no cache to compress", STOCK),
    _flag("--enable-mis", "items of one prompt would see each other", "one request per item"),
    _flag(
        "--tokenizer-worker-num",
        "further HTTP workers load no plugins, so they would check no request",
        "one of them",
        above("tokenizer_worker_num", 1),
    ),
    _flag("--enable-http2", "its HTTP server has no limits of connections", "HTTP/1.1"),
    _flag(
        "--kv-canary",
        "it checks slots in the layout of the stock pool",
        "--kv-canary none",
        other_than("kv_canary", "none"),
    ),
    _flag(
        "--enable-nvidia-megakernel",
        "it replaces the attention that reads these slots",
        "serve without it",
    ),
    Refusal(
        "--cuda-graph-backend-prefill full",
        lambda config: _graphs("prefill")(config) and not _graphs("prefill", "full")(config),
        "a full prefill graph skips the step that finds new requests",
        "--cuda-graph-backend-prefill breakable",
    ),
)
"""Rows over the resolved server arguments."""

EAGER = Refusal(
    "CUDA graphs",
    lambda config: any(_graphs(phase, "disabled")(config) for phase in ("decode", "prefill")),
    "the plain PyTorch executor reads lengths on the host and cannot be captured",
    "--disable-cuda-graph",
)
"""Holds while the ops in force are the plain ones."""

ENVIRONMENT = (
    (
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        "it replays metadata without the code that finds new requests",
    ),
    (
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "it sizes the pool after rings and sinks were allocated",
    ),
    (
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        "it prepares drafts on another stream than the one that writes rings",
    ),
    ("SGLANG_USE_HND_KVCACHE", "codes are stored token by token"),
    ("SGLANG_RUST_SERVER", "its HTTP server loads no plugins, so it would check no request"),
)
TRUE = ("true", "1", "yes", "y")
"""What SGLang reads as true; anything else means the default, which is false for all of
`ENVIRONMENT`."""

NO_TREES = {
    "states": "its other layers keep states",
    "windows": "SGLang moves a sliding window by the place of a draft in the step, and not by its"
    " depth in a tree",
}
"""Why other layers verify chains alone, by what they keep."""

CHUNKED = Refusal(
    "chunked local attention",
    lambda model: (
        bool(getattr(model, "attention_chunk_size", None))
        and not getattr(getattr(model, "hf_text_config", None), "hybrid_layer_pattern", None)
    ),
    "SGLang masks chunks in its FlashAttention backend alone, and runs layers beside an INT2"
    " cache in its Triton backend",
    STOCK,
)
INDEXED = Refusal(
    "sparse attention with an index",
    _inside("hf_text_config", other_than("indexer_n_heads")),
    "its backend replaces the one that reads these slots",
    STOCK,
)
MODEL = (
    Refusal(
        "MLA",
        lambda model: getattr(getattr(model, "attention_arch", None), "name", None) == "MLA",
        "it caches one latent vector, not keys and values",
        STOCK,
    ),
    Refusal(
        "KV shared between layers",
        _inside("hf_text_config", is_set("num_kv_shared_layers")),
        "every layer needs rows of its own",
        STOCK,
    ),
    Refusal(
        "--enable-multimodal with Gemma",
        _and(is_set("is_multimodal"), _inside("hf_config", _is_a(*TEXT_ONLY))),
        "tokens of an image would not see later ones of the same image",
        "text only, without --enable-multimodal",
    ),
    Refusal(
        "an encoder-decoder model",
        is_set("is_encoder_decoder"),
        "cross attention has no recent window",
        STOCK,
    ),
    CHUNKED,
    INDEXED,
)
"""Rows over SGLang's configuration of the model."""

CONFIG = (
    # MiMo-V2 gives the size of chunks beside that of its windows, and has no chunks.
    replace(
        CHUNKED,
        uses=lambda config: (
            _has("attention_chunk_size", "chunked_attention")(config)
            and not getattr(config, geometry.WINDOW_PATTERN, None)
        ),
    ),
    replace(INDEXED, uses=_has("indexer_n_heads")),
)
"""Rows over a `config.json`, and over its part about the language model."""

MISREAD = (
    Refusal(
        "EXAONE with another rope_theta than 1000000",
        _rotated_otherwise(None, 1e6, "exaone4", "exaone_moe"),
        "SGLang rotates by 1000000 whatever the file says, and its answers differ",
        "a model of this family with the usual value",
    ),
    Refusal(
        "Qwen3-Next with a rope_theta in rope_parameters alone",
        _rotated_otherwise("rope_theta", 1e4, "qwen3_next"),
        "SGLang reads it beside the other values of this model",
        "write it there, too",
    ),
    Refusal(
        "Qwen3-Next or Qwen3.5 without full_attention_interval in config.json",
        _lacks("full_attention_interval", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        "SGLang reads it, and transformers writes layer_types in its place",
        "add it: the number of layers from one with full attention to the next",
    ),
    Refusal(
        "gpt-oss without swiglu_limit in config.json",
        _lacks("swiglu_limit", "gpt_oss"),
        "SGLang reads it, and transformers does not write it",
        'add it as openai/gpt-oss-20b has it: "swiglu_limit": 7.0',
    ),
)
"""The same: what SGLang reads otherwise than it is written, or misses."""

WHOLE = (
    Refusal(
        "a Gemma 4 checkpoint that is the language model alone",
        _is_a("gemma4_text", "gemma4_unified_text"),
        "SGLang reads the two head sizes of its layers from the configuration of a whole Gemma 4"
        " only",
        "a whole checkpoint, such as google/gemma-4-31B-it, which is served with text",
    ),
)
"""Rows over a whole `config.json`."""

LAYER = (
    Refusal(
        "sliding_window_size", above("sliding_window_size", 0), "windows are not masked", STOCK
    ),
    Refusal(
        "xai_temperature_len",
        above("xai_temperature_len", 0),
        "position-dependent temperature is not implemented",
        STOCK,
    ),
    Refusal("cross attention", is_set("is_cross_attention"), "it has no recent window", STOCK),
    Refusal(
        "attention that is not causal",
        lambda layer: (
            str(getattr(getattr(layer, "attn_type", None), "value", "decoder")) != "decoder"
        ),
        "a token may not see later ones",
        STOCK,
    ),
)
"""Rows over one full-attention layer of the loaded model."""

SLIDING = (
    Refusal(
        "a layer that has no sliding window, although config.json says so,",
        lambda layer: (getattr(layer, "sliding_window_size", None) or 0) <= 0,
        "SGLang would free tokens that it needs",
        STOCK,
    ),
)
"""Rows over the layers that are not full-attention layers."""
