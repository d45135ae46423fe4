"""Flags, variables and requests that the INT2 cache does not support, refused by name. Needs
neither torch nor sglang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oscar_zoo.engines.sglang import speculation_refusals
from oscar_zoo.engines.sglang.refusal import (
    STOCK,
    Refusal,
    Uses,
    above,
    check_rows,
    is_set,
    other_than,
)
from oscar_zoo.engines.sglang.setting_flags import BACKEND
from oscar_zoo.errors import UsageError

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
FORK_BACKENDS = ("fa3", "triton")
"""Backends of the published fork for prefill and decode, which compute the same attention. The
plugin replaces them by its own backend, with a note. Other backends are refused."""


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
    *speculation_refusals.ROWS,
    Refusal(
        "--disaggregation-mode",
        other_than("disaggregation_mode", "null"),
        "prefill and decode servers would have to send rings and sinks as well",
        "one server for prefill and decode",
    ),
    Refusal(
        "--enable-hierarchical-cache",
        is_set("enable_hierarchical_cache"),
        "host copies of slots would lose their scales",
        "the prefix cache on the device",
    ),
    Refusal(
        "--enable-lmcache",
        is_set("enable_lmcache"),
        "it copies slots out of the pool",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--enable-flexkv",
        is_set("enable_flexkv"),
        "it copies slots out of the pool",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--enable-unified-cache-external-linker",
        is_set("enable_unified_cache_external_linker"),
        "it copies slots out of the pool",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--radix-cache-backend",
        is_set("radix_cache_backend"),
        "another prefix cache may not leave the recent window to prefill",
        "SGLang's own prefix cache",
    ),
    Refusal(
        "--enable-hisparse",
        is_set("enable_hisparse"),
        "it keeps other slots on the host",
        "a dense cache",
    ),
    Refusal(
        "--enable-kv-cache-sharding",
        is_set("enable_kv_cache_sharding"),
        "it needs another pool layout",
        "tensor parallelism",
    ),
    Refusal(
        "--enable-unified-memory",
        is_set("enable_unified_memory"),
        "slots of the shared pool have no room for codes and scales",
        "separate pools, the default",
    ),
    Refusal(
        "--enable-page-major-kv-layout",
        is_set("enable_page_major_kv_layout"),
        "codes are stored per layer",
        "the default layout",
    ),
    Refusal(
        "--enable-memory-saver",
        is_set("enable_memory_saver"),
        "releasing the pool would lose rings and sinks",
        "restart the server to free its memory",
    ),
    Refusal(
        "--enable-pdmux",
        is_set("enable_pdmux"),
        "two streams would write one ring",
        "chunked prefill",
    ),
    Refusal(
        "--enable-two-batch-overlap",
        is_set("enable_two_batch_overlap"),
        "two half batches would write one ring",
        "one batch at a time",
    ),
    Refusal(
        "--enable-streaming-session",
        is_set("enable_streaming_session"),
        "it keeps slots of a request beyond the life of its ring",
        "the prefix cache, which reuses earlier turns",
    ),
    Refusal("--dcp-size", above("dcp_size", 1), "each rank would hold part of a ring", "--tp-size"),
    Refusal(
        "--attn-cp-size",
        above("attn_cp_size", 1),
        "each rank would see part of a prompt",
        "--tp-size",
    ),
    Refusal(
        "--enable-prefill-cp",
        is_set("enable_prefill_cp"),
        "each rank would see part of a prompt",
        "--tp-size",
    ),
    Refusal(
        "--dllm-algorithm",
        is_set("dllm_algorithm"),
        "diffusion models rewrite tokens that are already cached",
        "a causal model",
    ),
    Refusal(
        "--prefill-only-disable-kv-cache",
        is_set("prefill_only_disable_kv_cache"),
        "there would be no cache to compress",
        STOCK,
    ),
    Refusal(
        "--enable-mis",
        is_set("enable_mis"),
        "items of one prompt would see each other",
        "one request per item",
    ),
    Refusal(
        "--tokenizer-worker-num",
        above("tokenizer_worker_num", 1),
        "further HTTP workers load no plugins, so they would check no request",
        "one of them",
    ),
    Refusal(
        "--enable-http2",
        is_set("enable_http2"),
        "its HTTP server has no limits of connections",
        "HTTP/1.1",
    ),
    Refusal(
        "--kv-canary",
        other_than("kv_canary", "none"),
        "it checks slots in the layout of the stock pool",
        "--kv-canary none",
    ),
    Refusal(
        "--enable-nvidia-megakernel",
        is_set("enable_nvidia_megakernel"),
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
    speculation_refusals.PLAN_STREAM,
    ("SGLANG_USE_HND_KVCACHE", "codes are stored token by token"),
    ("SGLANG_RUST_SERVER", "its HTTP server loads no plugins, so it would check no request"),
)

TRUE = ("true", "1", "yes", "y")
"""What SGLang reads as true; anything else means the default, which is false for all of
`ENVIRONMENT`."""

REQUEST = (
    Refusal(
        "beam_width",
        above("beam_width", 1),
        "beams copy slots of one request to others, whose rings stay empty",
        "n, which samples independently",
    ),
)
"""Rows over the sampling parameters of one request."""

MEDIA = Refusal(
    "a request with images, video or audio",
    lambda request: bool(request.contains_mm_input()),
    "this model is served with text only, and would answer as if they were not there",
    "send the text alone",
)
"""For servers without a processor of media, which SGLang lets drop them. The model of such a server
reads text only, or its images need attention to later tokens, as those of Gemma 3 do."""


def check_server(config: Any, environ: Mapping[str, str], *, eager_only: bool) -> None:
    """Refuse a server whose resolved arguments ask for more than an INT2 cache can do.

    Args:
        config: resolved server arguments, attributes only.
    """
    check_rows(config, (*SERVER, EAGER) if eager_only else SERVER, UsageError)
    for name, reason in ENVIRONMENT:
        if environ.get(name, "").lower() in TRUE:
            raise UsageError(
                f"{name} does not work with an INT2 KV cache: {reason}.", hint=f"unset {name}"
            )


def check_request(params: Any) -> None:
    """Refuse a request by its sampling parameters."""
    _check(REQUEST, params)


def check_media(request: Any) -> None:
    """Refuse a request to a server without a processor of media, if it has some."""
    _check((MEDIA,), request)


def _check(rows: Sequence[Refusal], subject: Any) -> None:
    for row in rows:
        if row.uses(subject):
            raise UsageError(f"{row.sentence} Instead: {row.instead}.")
