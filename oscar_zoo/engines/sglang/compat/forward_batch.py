"""SGLang's batches: from a `ForwardBatch` to a `StepInput`, and speculative decoding as SGLang
describes it: how many drafts, whose step it is, and which draft sees which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oscar_kernels.cache import Drafts
from oscar_zoo.engines.sglang.compat import geometry, releases
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.batch import ancestors
from oscar_zoo.runtime.engine import StepInput

if TYPE_CHECKING:
    from torch import Tensor


def step_input(forward_batch: Any) -> StepInput:
    """What one forward pass brings, for the INT2 cache.

    Prefill, chunked prefill and mixed batches are extend steps; a decode row of a mixed batch is an
    extend by one token. A batch with drafts is an extend batch for SGLang as well, so it is looked
    for first. An extend step waits for its request rows, other steps on a GPU wait for nothing.
    """
    rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
    out_loc = geometry.write_location(forward_batch.out_cache_loc)
    on_host = () if rows.is_cuda else tuple(rows.tolist())
    if forward_batch.forward_mode.is_target_verify():
        drafts = drafts_of(forward_batch, out_loc)
        return StepInput("verify", rows, on_host, seq_lens, out_loc, drafts=drafts)
    if not forward_batch.forward_mode.is_extend():
        return StepInput("decode", rows, on_host, seq_lens, out_loc[: len(rows)])
    prefix_lens = tuple(int(n) for n in forward_batch.extend_prefix_lens_cpu)
    extend_lens = tuple(int(n) for n in forward_batch.extend_seq_lens_cpu)
    return StepInput(
        "extend",
        rows,
        tuple(rows.tolist()),
        seq_lens,
        out_loc[: sum(extend_lens)],
        prefix_lens,
        extend_lens,
    )


def drafts() -> int:
    """Draft tokens of a request that a step verifies, 0 without speculative decoding."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return int(spec.speculative_num_draft_tokens or 1) if spec.speculative_algorithm else 0


def most_drafts() -> int:
    """Most query tokens of a request in a decode or verify step."""
    return drafts() or 1


def reserved_slots() -> int:
    """Token slots that a request has behind its tokens for the drafts of the next steps; 0 without
    speculative decoding."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return int(get_alloc_reserve_per_decode()) if drafts() else 0


def by_ngrams() -> bool:
    from sglang.srt.runtime_context import get_spec

    return str(get_spec().speculative_algorithm or "").upper() == "NGRAM"


def draft_model(args: Any, spec: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig.from_server_args(
        args,
        model_path=spec.speculative_draft_model_path or args.model_path,
        model_revision=spec.speculative_draft_model_revision,
        is_draft_model=True,
    )
    if model.is_hybrid_swa:
        raise UnsupportedModel(
            "the draft model does not work beside an INT2 KV cache: its layers with a sliding"
            " window have a pool of their own, which was never tested.",
            hint="a draft model with full attention alone, or --speculative-algorithm NGRAM",
        )
    return model


def draft_slot_bytes(configurator: Any) -> int:
    """Bytes that one token slot of a target takes in the cache of its draft model, over all layers
    of a worker; 0 without a draft model."""
    from sglang.srt.runtime_context import get_parallel, get_spec

    spec, algorithm = get_spec(), configurator.spec_algorithm
    if not (algorithm.is_eagle() or algorithm.is_standalone()):
        return 0
    model = draft_model(configurator.server_args, spec)
    layers = model.num_nextn_predict_layers
    if layers is None:
        layers = max(model.num_hidden_layers, model.num_attention_layers)
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    chosen = getattr(spec, releases.DRAFT_CACHE_TYPE.new, None)
    itemsize = 1 if str(chosen).startswith("fp8") else model.dtype.itemsize
    return int(layers) * int(heads) * (int(model.head_dim) + int(model.v_head_dim)) * itemsize


def drafts_of(forward_batch: Any, out_loc: Tensor) -> Drafts:
    """The drafts of a batch that verifies them. Nothing is read on the host. A chain stays where it
    is written. SGLang moves the accepted nodes of everything else.

    In front of a graph, and with DP attention, padding makes more requests of a batch than have
    drafts. `out_loc`, slots of the drafts, may be padded, too. They count where there are no
    drafts: while a graph is captured.
    """
    spec, rows = forward_batch.spec_info, forward_batch.req_pool_indices.numel()
    count = int(spec.draft_token_num)
    if getattr(spec, "topk", None) == 1:
        return Drafts(count)
    written = out_loc if spec.draft_token is None else spec.draft_token
    real = min(rows, written.numel() // count)
    return Drafts(count, ancestors(spec.custom_mask, forward_batch.seq_lens, count, real))
