"""Features that the INT2 cache does not support, refused by name at start-up. Needs neither torch
nor sglang.

There is one row per feature: the flag or model property, a test whether it is in use, the reason,
and what to use instead. Rows read the resolved configuration through plain attributes. An attribute
that a SGLang version does not have counts as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_zoo.engines.sglang.settings import BACKEND
from oscar_zoo.errors import OscarZooError, UnsupportedModel, UsageError

Uses = Callable[[Any], bool]
STOCK = "without INT2, python -m sglang.launch_server --model-path ... --kv-cache-dtype auto"
"""Advice for a model that cannot have an INT2 cache; `oscar-zoo serve` starts no other servers."""

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
FORK_BACKENDS = ("fa3", "triton")
"""Backends of the published fork for prefill and decode, which compute the same attention. The
plugin replaces them by its own backend, with a note. Other backends are refused."""


@dataclass(frozen=True)
class Refusal:
    """One row: `uses` looks at the configuration, and the three texts make up the message."""

    name: str
    uses: Uses
    reason: str
    instead: str

    @property
    def sentence(self) -> str:
        """The message without the hint."""
        return f"{self.name} does not work with an INT2 KV cache: {self.reason}."


def _set(name: str) -> Uses:
    return lambda config: bool(getattr(config, name, None))


def _other_than(name: str, *allowed: object) -> Uses:
    return lambda config: getattr(config, name, None) not in (None, *allowed)


def _above(name: str, limit: float) -> Uses:
    return lambda config: (getattr(config, name, None) or limit) > limit


def _graph_backend(
    phase: str, *, refused: Sequence[str] = (), allowed: Sequence[str] | None = None
) -> Uses:
    def uses(config: Any) -> bool:
        settings = getattr(getattr(config, "cuda_graph_config", None), phase, None)
        backend = getattr(settings, "backend", None)
        text = str(getattr(backend, "value", backend)).lower()
        if backend is None or getattr(config, "device", None) == "cpu":
            return False
        return text in refused or (allowed is not None and text not in allowed)

    return uses


def _foreign_backend(config: Any) -> bool:
    return any(getattr(config, name, None) not in (None, BACKEND) for name in BACKENDS)


SERVER = (
    Refusal(
        "--attention-backend",
        _foreign_backend,
        f"only the backend {BACKEND} can read these slots",
        "leave --attention-backend, --prefill-attention-backend and --decode-attention-backend"
        f" out, or say {BACKEND}",
    ),
    Refusal(
        "--speculative-algorithm",
        _set("speculative_algorithm"),
        "draft and verify steps move slots that the rings do not follow",
        "serve without speculative decoding",
    ),
    Refusal(
        "--disaggregation-mode",
        _other_than("disaggregation_mode", "null"),
        "prefill and decode servers would have to send rings and sinks as well",
        "one server for prefill and decode",
    ),
    Refusal(
        "--enable-hierarchical-cache",
        _set("enable_hierarchical_cache"),
        "host copies of slots would lose their scales",
        "the prefix cache on the device",
    ),
    Refusal(
        "--enable-lmcache",
        _set("enable_lmcache"),
        "it copies slots out of the pool",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--enable-flexkv",
        _set("enable_flexkv"),
        "it copies slots out of the pool",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--enable-unified-cache-external-linker",
        _set("enable_unified_cache_external_linker"),
        "it copies slots out of the pool",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--radix-cache-backend",
        _set("radix_cache_backend"),
        "another prefix cache may not leave the recent window to prefill",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--enable-hisparse",
        _set("enable_hisparse"),
        "it keeps other slots on the host",
        "a dense cache",
    ),
    Refusal(
        "--enable-kv-cache-sharding",
        _set("enable_kv_cache_sharding"),
        "it needs another pool layout",
        "tensor parallelism",
    ),
    Refusal(
        "--enable-unified-memory",
        _set("enable_unified_memory"),
        "slots of the shared pool have no room for codes and scales",
        "separate pools, the default",
    ),
    Refusal(
        "--enable-page-major-kv-layout",
        _set("enable_page_major_kv_layout"),
        "codes are stored per layer",
        "the default layout",
    ),
    Refusal(
        "--enable-memory-saver",
        _set("enable_memory_saver"),
        "releasing the pool would lose rings and sinks",
        "restart the server to free its memory",
    ),
    Refusal(
        "--enable-pdmux",
        _set("enable_pdmux"),
        "two streams would write one ring",
        "chunked prefill",
    ),
    Refusal(
        "--enable-two-batch-overlap",
        _set("enable_two_batch_overlap"),
        "two half batches would write one ring",
        "one batch at a time",
    ),
    Refusal(
        "--enable-streaming-session",
        _set("enable_streaming_session"),
        "it keeps slots of a request beyond the life of its ring",
        "the prefix cache, which reuses earlier turns",
    ),
    Refusal(
        "--dcp-size", _above("dcp_size", 1), "each rank would hold part of a ring", "--tp-size"
    ),
    Refusal(
        "--attn-cp-size",
        _above("attn_cp_size", 1),
        "each rank would see part of a prompt",
        "--tp-size",
    ),
    Refusal(
        "--enable-prefill-cp",
        _set("enable_prefill_cp"),
        "each rank would see part of a prompt",
        "--tp-size",
    ),
    Refusal(
        "--dllm-algorithm",
        _set("dllm_algorithm"),
        "diffusion models rewrite tokens that are already cached",
        "a causal model",
    ),
    Refusal(
        "--prefill-only-disable-kv-cache",
        _set("prefill_only_disable_kv_cache"),
        "there would be no cache to compress",
        STOCK,
    ),
    Refusal(
        "--enable-mis",
        _set("enable_mis"),
        "items of one prompt would see each other",
        "one request per item",
    ),
    Refusal(
        "--kv-canary",
        _other_than("kv_canary", "none"),
        "it checks slots in the layout of the stock pool",
        "--kv-canary none",
    ),
    Refusal(
        "--enable-nvidia-megakernel",
        _set("enable_nvidia_megakernel"),
        "it replaces the attention that reads these slots",
        "serve without it",
    ),
    Refusal(
        "--cuda-graph-backend-prefill full",
        _graph_backend("prefill", refused=("full",)),
        "a full prefill graph skips the step that finds new requests",
        "--cuda-graph-backend-prefill breakable",
    ),
)
"""Rows over the resolved server arguments."""

EAGER = Refusal(
    "CUDA graphs",
    lambda config: (
        _graph_backend("decode", allowed=("disabled",))(config)
        or _graph_backend("prefill", allowed=("disabled",))(config)
    ),
    "the plain PyTorch executor reads lengths on the host and cannot be captured",
    "--disable-cuda-graph",
)
"""Holds while the executor in force is the plain one."""

ENVIRONMENT = (
    (
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        "it replays metadata without the code that finds new requests",
    ),
    (
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "it sizes the pool after rings and sinks were allocated",
    ),
    ("SGLANG_USE_HND_KVCACHE", "codes are stored token by token"),
)

TRUE = ("true", "1", "yes", "y")
"""What SGLang reads as true; anything else means the default, which is false for all of
`ENVIRONMENT`."""

REQUEST = (
    Refusal(
        "beam_width",
        _above("beam_width", 1),
        "beams copy slots of one request to others, whose rings stay empty",
        "n, which samples independently",
    ),
)
"""Rows over the sampling parameters of one request."""

MODEL = (
    Refusal(
        "MLA",
        lambda model: getattr(getattr(model, "attention_arch", None), "name", None) == "MLA",
        "it caches one latent vector, not keys and values",
        STOCK,
    ),
    Refusal(
        "a sliding-window hybrid model",
        _set("is_hybrid_swa"),
        "its window layers have a pool of their own",
        STOCK,
    ),
    Refusal(
        "a model with attention sinks as weights",
        _set("has_attention_sinks"),
        "the learned sink logit is not part of this attention",
        STOCK,
    ),
    Refusal(
        "an encoder-decoder model",
        _set("is_encoder_decoder"),
        "cross attention has no recent window",
        STOCK,
    ),
    Refusal(
        "chunked local attention",
        _set("attention_chunk_size"),
        "tokens outside the chunk must not be seen",
        STOCK,
    ),
    Refusal(
        "sparse attention with an index",
        lambda model: (
            getattr(getattr(model, "hf_text_config", None), "indexer_n_heads", None) is not None
        ),
        "its backend replaces the one that reads these slots",
        STOCK,
    ),
)
"""Rows over the model configuration."""

LAYER = (
    Refusal(
        "sliding_window_size", _above("sliding_window_size", 0), "windows are not masked", STOCK
    ),
    Refusal("logit_cap", _above("logit_cap", 0.0), "capped logits are not implemented", STOCK),
    Refusal(
        "xai_temperature_len",
        _above("xai_temperature_len", 0),
        "position-dependent temperature is not implemented",
        STOCK,
    ),
    Refusal("cross attention", _set("is_cross_attention"), "it has no recent window", STOCK),
    Refusal(
        "attention that is not causal",
        lambda layer: (
            str(getattr(getattr(layer, "attn_type", None), "value", "decoder")) != "decoder"
        ),
        "a token may not see later ones",
        STOCK,
    ),
)
"""Rows over one attention layer of the loaded model."""


def check_server(config: Any, environ: Mapping[str, str], *, eager_only: bool) -> None:
    """Refuse a server whose resolved arguments ask for more than an INT2 cache can do.

    Args:
        config: resolved server arguments, attributes only.
        environ: the environment of the server.
        eager_only: this server cannot capture CUDA graphs.

    Raises:
        UsageError: names the flag or variable, the reason and what to use in its place.
    """
    check_rows(config, (*SERVER, EAGER) if eager_only else SERVER, UsageError)
    for name, reason in ENVIRONMENT:
        if environ.get(name, "").lower() in TRUE:
            raise UsageError(
                f"{name} does not work with an INT2 KV cache: {reason}.", hint=f"unset {name}"
            )


def check_request(params: Any) -> None:
    """Refuse a request by its sampling parameters.

    Raises:
        UsageError: as `check_server`, in one line, because SGLang returns nothing but the message.
    """
    for row in REQUEST:
        if row.uses(params):
            raise UsageError(f"{row.sentence} Instead: {row.instead}.")


def check_model(config: Any) -> None:
    """Refuse a model by its configuration, attributes only.

    Raises:
        UnsupportedModel: names the property, the reason and what to use in its place.
    """
    check_rows(config, MODEL, UnsupportedModel)


def check_layers(layers: Iterable[Any]) -> None:
    """Refuse a model by the attention layers it was built from.

    Raises:
        UnsupportedModel: as `check_model`.
    """
    for layer in layers:
        check_rows(layer, LAYER, UnsupportedModel)


def check_rows(config: Any, rows: Iterable[Refusal], error: type[OscarZooError]) -> None:
    """Raise `error` for the first row that `config` uses; it names the row, the reason and what to
    use in its place."""
    for row in rows:
        if row.uses(config):
            raise error(row.sentence, hint=f"instead: {row.instead}")
