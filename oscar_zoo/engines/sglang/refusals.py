"""What the INT2 cache does not support, refused by name: one table of rows for each thing that is
looked at, from the `config.json` before a start to the layers of the loaded model. Needs neither
torch nor sglang.

Rows read plain attributes. One that a SGLang version does not have counts as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oscar_zoo.engines.setting_flags import BACKEND, OPTIONS
from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.errors import OscarZooError, UnsupportedModel, UsageError
from oscar_zoo.models import geometry
from oscar_zoo.models.config_file import ConfigFile, check_cache
from oscar_zoo.models.geometry import LATENT, number, refuse_latents

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
HOST_PAGE = 16
"""`oscar_zoo.runtime.host_pages.LEAST_PAGE`, which needs torch."""
DISK, STORAGE_BACKEND = OPTIONS["disk_cache"].variable, "file"
"""Where a folder for pages is named, and the backend of SGLang that ours stands in for."""
SALTED = (0, 5, 21)
"""From here on SGLang names a page by more than its tokens."""
TEXT_ONLY = ("gemma3", "gemma4", "gemma4_unified")
"""Model types with images that are served with text alone."""
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
LATENT_WIDTHS, MOST_LATENT_HEADS = (128, 256, 512), 128
"""Model types whose latents (MLA) are served, the channels of a latent that kernels have, and most
query heads that share one: `oscar_kernels.decode_attention.latent`, which needs torch."""
OWN_CODE = ("mimo_v2", "mimo_v2_flash")
"""Model types that SGLang reads with the configuration class of the checkpoint alone, or that it
reads wrongly with the class of transformers."""


@dataclass(frozen=True)
class Refusal:
    """One row: `uses` looks at a configuration, and the three texts make up the message."""

    name: str
    reason: str
    uses: Uses
    instead: str = STOCK

    @property
    def sentence(self) -> str:
        return f"{self.name} does not work with an INT2 KV cache: {self.reason}."


def check_config(config: ConfigFile, model_id: str) -> None:
    """Refuse a model by its `config.json`, before SGLang reads it; the part about the language
    model comes first. What `compute` and `eval` refuse is refused here in the same sentence."""
    check_cache(config, model_id)
    text = config.get_text_config()
    if not _is_a(*LATENT_TYPES)(text):
        refuse_latents(text, model_id)
    elif (
        number(text, LATENT) not in LATENT_WIDTHS
        or number(text, "num_attention_heads") > MOST_LATENT_HEADS
    ):
        widths = "latents of 128, 256 or 512 channels and 128 heads at most"
        refuse_latents(text, model_id, f"kernels here take {widths}")
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
    check_rows(config, (*SERVER, EAGER) if eager_only else SERVER, UsageError)
    check_rows(config, ON_DISK if DISK in environ else (STORAGE,), UsageError)
    for name, reason in ENVIRONMENT.items():
        if environ.get(name, "").lower() in TRUE:
            raise UsageError(
                f"{name} does not work with an INT2 KV cache: {reason}.", hint=f"unset {name}"
            )


def check_model(config: Any) -> None:
    check_rows(config, MODEL, UnsupportedModel)


def check_layers(config: Any, others: str | None) -> None:
    """Refuse trees of drafts for a model whose other layers verify chains alone, and pages on the
    host for one that has other layers at all. `others`: what layers without full attention keep;
    see `geometry.other_layers`."""
    if others is not None and _get(config, "enable_hierarchical_cache"):
        raise UnsupportedModel(
            "--enable-hierarchical-cache does not work with an INT2 KV cache of this model: nobody"
            f" has tried to bring back what its other layers keep ({others}).",
            hint="leave it out",
        )
    if not _algorithm(config) or others is None:
        return
    flag = BREADTH if _algorithm(config) == "NGRAM" else BRANCHES
    if _get(config, _attribute(flag)) != 1:
        raise UnsupportedModel(
            "a tree of drafts does not work with an INT2 KV cache of this model, because"
            f" {NO_TREES[others]}.",
            hint=f"use a chain: {flag}=1",
        )


def check_latents(config: Any, others: str | None, bits: Collection[int] = (2,)) -> None:
    """Refuse what nobody has tried with a cache of latents, whose codes have `bits`. `others`: as
    for `check_layers`."""
    check_rows(config, LATENTS, UnsupportedModel)
    if _get(config, "device") != "cpu" and set(bits) != {2}:
        raise UnsupportedModel(
            "the kernel for latents (MLA) reads codes of 2 bits, and this artifact has wider ones.",
            hint="oscar-zoo compute --bits 2",
        )
    if others is not None:
        raise UnsupportedModel(
            f"an INT2 KV cache of latents (MLA) does not go with layers that keep {others}.",
            hint=f"instead: {STOCK}",
        )


def has_draft_model(config: Any) -> bool:
    return _algorithm(config) not in ("", "NGRAM")


def check_attention(layers: Iterable[Any]) -> None:
    for layer in layers:
        check_rows(layer, LAYER, UnsupportedModel)


def check_sliding_layers(layers: Iterable[Any]) -> None:
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
    for row in rows:
        if row.uses(config):
            raise error(row.sentence, hint=f"instead: {row.instead}")


# How rows look at a configuration.


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _get(config: Any, path: str) -> Any:
    """An attribute, or one of a part of a configuration; `None` where something is missing."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _is_set(path: str) -> Uses:
    return lambda config: bool(_get(config, path))


def _other_than(path: str, *allowed: object) -> Uses:
    return lambda config: _get(config, path) not in (None, *allowed)


def _above(path: str, limit: float) -> Uses:
    return lambda config: (_get(config, path) or limit) > limit


def _is_a(*model_types: str) -> Uses:
    return lambda config: _get(config, "model_type") in model_types


def _lacks(name: str, *model_types: str) -> Uses:
    return lambda config: _is_a(*model_types)(config) and _get(config, name) is None


def _both(one: Uses, other: Uses) -> Uses:
    return lambda config: one(config) and other(config)


def _rotated_otherwise(read: str, usual: float, *model_types: str) -> Uses:
    """Whether SGLang rotates by another base than the file says. `read`: the value that SGLang
    takes; where it is not there, SGLang takes `usual`."""

    def uses(config: Any) -> bool:
        taken = _get(config, read) or usual
        given = _get(config, "rope_parameters") or {}
        said = given.get("rope_theta") or _get(config, "rope_theta") or taken
        return _is_a(*model_types)(config) and float(said) != float(taken)

    return uses


def _number(config: Any, path: str) -> float:
    """0 also for what is none, which SGLang refuses itself."""
    found = _get(config, path)
    return found if isinstance(found, int | float) else 0


def _algorithm(config: Any) -> str:
    return str(_get(config, "speculative_algorithm") or "").upper()


def _chunked_model(model: Any) -> bool:
    pattern = _get(model, f"hf_text_config.{geometry.WINDOW_PATTERN}")
    return bool(_get(model, "attention_chunk_size")) and not pattern


def _chunked_config(config: Any) -> bool:
    """MiMo-V2 gives the size of chunks beside that of its windows, and has no chunks."""
    chunked = "chunked_attention" in (_get(config, "layer_types") or ())
    sized = bool(_get(config, "attention_chunk_size"))
    return (sized or chunked) and not _get(config, geometry.WINDOW_PATTERN)


def _captured(config: Any, phase: str) -> str:
    backend = _get(config, f"cuda_graph_config.{phase}.backend")
    if backend is None or _get(config, "device") == "cpu":
        return "disabled"
    return str(getattr(backend, "value", backend)).lower()


def _switch(flag: str, reason: str, instead: str = "leave it out") -> Refusal:
    return Refusal(flag, reason, _is_set(_attribute(flag)), instead)


def _with_drafts(flag: str, reason: str, uses: Uses | None = None) -> Refusal:
    used = _both(_is_set("speculative_algorithm"), uses or _is_set(_attribute(flag)))
    return Refusal(flag, reason, used, "leave it out with drafts")


def _host_cache(name: str, reason: str, uses: Uses, instead: str) -> Refusal:
    """A row about a server that keeps pages in the host's memory."""
    return Refusal(name, reason, _both(_is_set("enable_hierarchical_cache"), uses), instead)


# The rows.

SERVER = (
    Refusal(
        "--attention-backend",
        f"only the backend {BACKEND} can read these slots",
        lambda config: any(_other_than(name, BACKEND)(config) for name in BACKENDS),
        f"leave out all flags of attention backends, or say {BACKEND}",
    ),
    Refusal(
        "--speculative-algorithm",
        "its drafts are no chain or tree that one step verifies, or nobody has tested it",
        lambda config: _algorithm(config) not in ("", *SERVED),
        f"--speculative-algorithm {' or '.join(SERVED)}",
    ),
    _switch(
        "--speculative-adaptive",
        "it changes the number of drafts, which the rings are sized for",
        "--speculative-num-draft-tokens",
    ),
    Refusal(
        "--speculative-num-draft-tokens",
        f"a step verifies {MOST_DRAFTS} drafts of a request at most",
        _above("speculative_num_draft_tokens", MOST_DRAFTS),
        f"--speculative-num-draft-tokens {MOST_DRAFTS}",
    ),
    Refusal(
        "--speculative-draft-attention-backend",
        "the cache of the draft model is SGLang's own",
        lambda config: _get(config, "speculative_draft_attention_backend") == BACKEND,
        "--speculative-draft-attention-backend flashinfer",
    ),
    Refusal(
        "--enable-multi-layer-eagle",
        "trees of several draft layers were never tested",
        _both(_is_set("enable_multi_layer_eagle"), _above("speculative_eagle_topk", 1)),
        "--speculative-eagle-topk 1",
    ),
    _with_drafts("--enable-linear-replayssm-spec", "nobody has tested it"),
    _with_drafts(
        "--pp-size",
        "with drafts the stages of a pipeline would commit at different times",
        _above("pp_size", 1),
    ),
    _with_drafts("--enable-mixed-chunk", "a step has either prompts or drafts"),
    Refusal(
        "--disaggregation-mode",
        "prefill and decode servers would have to send rings and sinks as well",
        _other_than("disaggregation_mode", "null"),
        "one server for prefill and decode",
    ),
    _host_cache(
        "--enable-hierarchical-cache",
        "drafts and the stages of a pipeline were never tried with it",
        lambda config: bool(_algorithm(config)) or _above("pp_size", 1)(config),
        "leave it out with --speculative-algorithm and --pp-size",
    ),
    _host_cache(
        "--page-size",
        f"a page on the host has {HOST_PAGE} tokens or a multiple",
        lambda config: bool(_number(config, "page_size") % HOST_PAGE),
        "--page-size 64",
    ),
    _host_cache(
        "--disable-radix-cache",
        "only what the prefix cache knows comes back",
        _is_set("disable_radix_cache"),
        "leave it out",
    ),
    Refusal(
        "--hicache-host-memory-mode",
        "its pages are for a storage backend",
        _other_than("hicache_host_memory_mode", "cache"),
        "leave it out",
    ),
    _switch("--enable-lmcache", "it copies slots out of the pool"),
    _switch("--enable-flexkv", "it copies slots out of the pool"),
    _switch("--enable-unified-cache-external-linker", "it copies slots out of the pool"),
    _switch("--radix-cache-backend", "it may not leave the recent window to prefill"),
    _switch("--enable-hisparse", "it keeps other slots on the host"),
    _switch("--enable-kv-cache-sharding", "it needs another pool layout"),
    _switch("--enable-unified-memory", "slots of the shared pool have no room for scales"),
    _switch("--enable-page-major-kv-layout", "codes are stored per layer"),
    _switch("--enable-memory-saver", "releasing the pool would lose rings and sinks"),
    _switch("--enable-pdmux", "two streams would write one ring"),
    _switch("--enable-two-batch-overlap", "two half batches would write one ring"),
    _switch("--enable-streaming-session", "it keeps slots beyond the life of a ring"),
    Refusal(
        "--dcp-size", "each rank would hold part of a ring", _above("dcp_size", 1), "--tp-size"
    ),
    Refusal(
        "--attn-cp-size",
        "each rank would see part of a prompt",
        _above("attn_cp_size", 1),
        "--tp-size",
    ),
    _switch("--enable-prefill-cp", "each rank would see part of a prompt", "--tp-size"),
    _switch("--dllm-algorithm", "diffusion models rewrite tokens that are already cached"),
    _switch("--prefill-only-disable-kv-cache", "there would be no cache to compress", STOCK),
    _switch("--enable-mis", "items of one prompt would see each other"),
    Refusal(
        "--tokenizer-worker-num",
        "further HTTP workers load no plugins, so they would check no request",
        _above("tokenizer_worker_num", 1),
        "one of them",
    ),
    _switch("--enable-http2", "its HTTP server has no limits of connections"),
    Refusal(
        "--kv-canary",
        "it checks slots in the layout of the stock pool",
        _other_than("kv_canary", "none"),
        "--kv-canary none",
    ),
    _switch("--enable-nvidia-megakernel", "it replaces the attention that reads these slots"),
    Refusal(
        "--cuda-graph-backend-prefill full",
        "a full prefill graph skips the step that finds new requests",
        lambda config: _captured(config, "prefill") == "full",
        "--cuda-graph-backend-prefill breakable",
    ),
)
"""Rows over the resolved server arguments."""

STORAGE = _switch(
    "--hicache-storage-backend",
    "pages that outlive a server do not name their artifact",
    "--oscar-disk-cache DIR",
)
"""Holds without files of ours."""

ON_DISK = (
    Refusal(
        "a disk cache without --enable-hierarchical-cache",
        "files keep what the host's memory has",
        lambda config: not _get(config, "enable_hierarchical_cache"),
        "add it, or oscar-zoo serve --host-cache SIZE",
    ),
    Refusal(
        "a disk cache with another --hicache-storage-backend",
        "pages are stored once",
        _other_than("hicache_storage_backend", STORAGE_BACKEND),
        "leave it out",
    ),
    Refusal(
        "a disk cache on several GPUs",
        "nobody has tried whether their files agree",
        lambda config: max(_number(config, "tp_size"), _number(config, "dp_size")) > 1,
        "one GPU, or --host-cache alone",
    ),
    Refusal(
        "a disk cache with --enable-lora",
        "SGLang names an adapter by its path, whatever it holds",
        lambda config: bool(_get(config, "enable_lora") or _get(config, "lora_paths")),
        "leave out one of the two",
    ),
    Refusal(
        "a disk cache in SGLang before 0.5.21",
        "its names of pages leave out the salt and the adapter of a request",
        lambda _: releases.installed_from((0,)) and not releases.installed_from(SALTED),
        "pip install 'sglang>=0.5.21'",
    ),
)
"""Rows over a server that keeps pages in files."""

EAGER = Refusal(
    "CUDA graphs",
    "the plain PyTorch executor reads lengths on the host and cannot be captured",
    lambda config: any(_captured(config, one) != "disabled" for one in ("decode", "prefill")),
    "--disable-cuda-graph",
)
"""Holds while the ops in force are the plain ones."""

ENVIRONMENT = {
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": (
        "it replays metadata without the code that finds new requests"
    ),
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": (
        "it sizes the pool after rings and sinks were allocated"
    ),
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": (
        "it prepares drafts on another stream than the one that writes rings"
    ),
    "SGLANG_USE_HND_KVCACHE": "codes are stored token by token",
    "SGLANG_RUST_SERVER": "its HTTP server loads no plugins, so it would check no request",
}
TRUE = ("true", "1", "yes", "y")
"""What SGLang reads as true; anything else means the default, which is false for all of
`ENVIRONMENT`."""

NO_TREES = {
    "states": "its other layers keep states",
    "windows": "SGLang moves a sliding window by the place of a draft in the step, and not by its"
    " depth in a tree",
}
"""Why other layers verify chains alone, by what they keep."""

CHUNKS = (
    "chunked local attention",
    "SGLang masks chunks in its FlashAttention backend alone, and runs layers beside an INT2"
    " cache in its Triton backend",
)
INDEX = ("sparse attention with an index", "its backend replaces the one that reads these slots")
INDEXED = ("indexer_n_heads", "index_topk")
"""Keys of a configuration that say so."""
MODEL = (
    Refusal(
        "MLA in a model other than DeepSeek V2, V3 and GLM-4.7-Flash",
        "nobody has tried whether its attention hands over latents in the same way",
        lambda model: (
            _get(model, "attention_arch.name") == "MLA"
            and _get(model, "hf_text_config.model_type") not in LATENT_TYPES
        ),
    ),
    Refusal(
        "KV shared between layers",
        "every layer needs rows of its own",
        _is_set("hf_text_config.num_kv_shared_layers"),
    ),
    Refusal(
        "--enable-multimodal with Gemma",
        "tokens of an image would not see later ones of the same image",
        lambda model: (
            bool(_get(model, "is_multimodal")) and _get(model, "hf_config.model_type") in TEXT_ONLY
        ),
        "text only, without --enable-multimodal",
    ),
    Refusal(
        "an encoder-decoder model",
        "cross attention has no recent window",
        _is_set("is_encoder_decoder"),
    ),
    Refusal(*CHUNKS, _chunked_model),
    Refusal(
        *INDEX,
        lambda model: any(_is_set(f"hf_text_config.{name}")(model) for name in INDEXED),
    ),
)
"""Rows over SGLang's configuration of the model."""

LATENTS = (
    Refusal(
        "MLA with --dp-size or --pp-size",
        "nobody has tried it",
        lambda config: any(_number(config, f"{kind}_size") > 1 for kind in ("dp", "pp")),
        "--tp-size alone",
    ),
    Refusal("MLA with drafts", "nobody has tried it", _is_set("speculative_algorithm")),
    Refusal(
        "MLA with --enable-hierarchical-cache",
        "nobody has tried to bring its latents back",
        _is_set("enable_hierarchical_cache"),
        "leave it out",
    ),
)
"""Rows over the resolved server arguments of a model that caches latents."""

CONFIG = (
    Refusal(*CHUNKS, _chunked_config),
    Refusal(*INDEX, lambda config: any(_is_set(name)(config) for name in INDEXED)),
)
"""Rows over a `config.json`, and over its part about the language model."""

MISREAD = (
    Refusal(
        "EXAONE with another rope_theta than 1000000",
        "SGLang rotates by 1000000 whatever the file says, and its answers differ",
        _rotated_otherwise("", 1e6, "exaone4", "exaone_moe"),
        "a model of this family with the usual value",
    ),
    Refusal(
        "Qwen3-Next with a rope_theta in rope_parameters alone",
        "SGLang reads it beside the other values of this model",
        _rotated_otherwise("rope_theta", 1e4, "qwen3_next"),
        "write it there, too",
    ),
    Refusal(
        "Qwen3-Next or Qwen3.5 without full_attention_interval in config.json",
        "SGLang reads it, and transformers writes layer_types in its place",
        _lacks("full_attention_interval", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        "add it: the number of layers from one with full attention to the next",
    ),
    Refusal(
        "gpt-oss without swiglu_limit in config.json",
        "SGLang reads it, and transformers does not write it",
        _lacks("swiglu_limit", "gpt_oss"),
        'add it as openai/gpt-oss-20b has it: "swiglu_limit": 7.0',
    ),
)
"""The same: what SGLang reads otherwise than it is written, or misses."""

WHOLE = (
    Refusal(
        "a Gemma 4 checkpoint that is the language model alone",
        "SGLang reads the two head sizes of its layers from the configuration of a whole Gemma 4"
        " only",
        _is_a("gemma4_text", "gemma4_unified_text"),
        "a whole checkpoint, such as google/gemma-4-31B-it, which is served with text",
    ),
)
"""Rows over a whole `config.json`."""

LAYER = (
    Refusal("sliding_window_size", "windows are not masked", _above("sliding_window_size", 0)),
    Refusal(
        "xai_temperature_len",
        "position-dependent temperature is not implemented",
        _above("xai_temperature_len", 0),
    ),
    Refusal("cross attention", "it has no recent window", _is_set("is_cross_attention")),
    Refusal(
        "attention that is not causal",
        "a token may not see later ones",
        _other_than("attn_type.value", "decoder"),
    ),
)
"""Rows over one full-attention layer of the loaded model."""

SLIDING = (
    Refusal(
        "a layer that has no sliding window, although config.json says so,",
        "SGLang would free tokens that it needs",
        lambda layer: (_get(layer, "sliding_window_size") or 0) <= 0,
    ),
)
"""Rows over the layers that are not full-attention layers."""
