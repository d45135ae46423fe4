"""Stock vLLM with its V2 runner, which generates for tests. On a CPU it runs without its compiled
code: Triton interprets the kernels of the runner, and the few other operations that a dense model
asks for are here.

    python vllm_child.py cpu|cuda < JOB.json
    python vllm_child.py -m MODULE ...      # another program with vLLM, on a CPU

Forks of a process that has imported this call `forked`, see `sglang_forks`. A job has `options` of
`vllm.LLM`, `rounds` of prompts as lists of ids, `new` tokens for each, and whether this process had
such a model `before`. On a CPU it also says whether decode steps read what the first one of as many
requests was given, as a CUDA graph does.
The last line of the output is JSON: tokens and cached tokens of each prompt, what the runner did,
what was counted of drafts behind each round, tokens of a page and layers of each group, the counts
of sink blocks and how many there are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

MODE = (*sys.argv, "cpu")[1]
CPU, ROOT = MODE != "cuda", Path(__file__).resolve().parents[3]
os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU also: no process for the worker alone
    "HF_HUB_OFFLINE": "1",
}
if MODE != "-m":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
if CPU:
    places = Path(sys.prefix) / "vllm", ROOT, ROOT / "kernels", ROOT / "tests/support"
    path = os.pathsep.join(map(str, places))
    if __name__ == "__main__" and os.environ.get("PYTHONPATH") != path:
        # The code of this checkout, wherever it is installed.
        os.environ["PYTHONPATH"] = path
        os.execv(sys.executable, [sys.executable, "-P", *sys.argv])
    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",  # else vLLM looks for a driver of Triton
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def silu_and_mul(result: Any, x: Any) -> None:
    half = x.shape[-1] // 2
    result.copy_(x[..., :half].sigmoid() * x[..., :half] * x[..., half:])


def gelu_tanh_and_mul(result: Any, x: Any) -> None:
    import torch

    half = x.shape[-1] // 2
    result.copy_(torch.nn.functional.gelu(x[..., :half], approximate="tanh") * x[..., half:])


def rms_norm(result: Any, x: Any, weight: Any, epsilon: float) -> None:
    y = x.float() * (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    result.copy_(y.to(x.dtype) * (1 if weight is None else weight))


def fused_add_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def rotary_embedding(at: Any, query: Any, key: Any, size: int, table: Any, is_neox: bool) -> None:
    cos, sin = table[at.flatten()].chunk(2, -1)
    for x in (query, key):
        first, second = x.view(len(cos), -1, size)[..., : table.shape[1]].chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        turned = first * c - second * s, second * c + first * s
        first.copy_(turned[0]), second.copy_(turned[1])


def store_rows(*given: Any) -> None:
    """`keys` and `values` are pages `[pages, heads, size, head_dim]`."""
    key, value, keys, values, slots, *_ = given
    taken = (slots >= 0).nonzero().flatten()
    pages, at = slots[taken] // keys.shape[2], slots[taken] % keys.shape[2]
    keys[pages, :, at], values[pages, :, at] = key[taken], value[taken]


def attention(*given: Any) -> None:
    """`keys` and `values` as above; `tables`: pages of every request."""
    import torch

    query, keys, values, output, starts, lengths, scale, _, _, window, *rest = given
    tables, cap, _, sinks, *_ = rest
    bounds, page, group = starts.tolist(), keys.shape[2], query.shape[1] // keys.shape[1]
    for table, length, first, last in zip(
        tables, lengths.tolist(), bounds[:-1], bounds[1:], strict=False
    ):  # tables of padding are left over
        at = torch.arange(length - last + first, length)[:, None]
        seen = torch.arange(max(0, length - last + first - window + 1) if window > 0 else 0, length)
        own = table[seen // page].long(), slice(None), seen % page
        k, v = (x[own].float().repeat_interleave(group, 1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * scale
        if cap:
            logits = cap * (logits / cap).tanh()
        hidden = (seen > at) | ((window > 0) & (at - seen >= window))
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, len(at), 1)], -1)
        shares = logits.softmax(-1)[..., : len(seen)]
        output[first:last] = torch.einsum("hqk,khd->qhd", shares, v).to(output.dtype)


def packed(weight: Any, output: Any, isa: str) -> None:
    output.copy_(weight)


def experts(*given: Any) -> None:
    """Those with biases are of gpt-oss, whose gates and inputs take turns."""
    output, x, w13, w2, b13, b2, shares, chosen, *_ = given
    output.zero_()
    for one in chosen.unique().tolist():
        rows, place = (chosen == one).nonzero(as_tuple=True)
        both = x[rows] @ w13[one].T
        if b13 is None:
            gate, up = both.chunk(2, -1)
            made = (gate.sigmoid() * gate * up) @ w2[one].T
        else:
            both += b13[one]
            gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
            made = ((up + 1) * gate * (1.702 * gate).sigmoid()) @ w2[one].T + b2[one]
        output.index_add_(0, rows, made * shares[rows, place, None].to(made.dtype))


def delta_rule(mixed: Any, b: Any, a: Any, output: Any, name: Any) -> None:
    """A layer's gated delta nets, token by token, with the inputs and states that vLLM keeps."""
    import torch
    from torch.nn.functional import normalize, silu, softplus
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:
        return
    layer = context.no_compile_layers[_resolve_layer_name(name)]
    told, weight = context.attn_metadata[layer.prefix], layer.conv1d.weight[:, 0]
    decays = (-layer.A_log.exp() * softplus(a + layer.dt_bias)).exp()[..., None, None]
    begun, bounds = told.has_initial_state, told.non_spec_query_start_loc.tolist()
    for i, place in enumerate(told.non_spec_state_indices_tensor[: len(bounds) - 1]):
        own = slice(bounds[i], bounds[i + 1])
        for one in layer.kv_cache if begun is not None and not begun[i] else ():
            one[place] = 0
        inputs, state = (one[place] for one in layer.kv_cache)
        inputs = torch.cat([inputs, mixed[own]])
        x = silu((inputs.unfold(0, weight.shape[1], 1) * weight).sum(-1))
        q, k, v = (one[0] for one in layer.rearrange_mixed_qkv(x))
        times = v.shape[1] // q.shape[1]
        q, k = (normalize(one, dim=-1).repeat_interleave(times, 1)[..., None] for one in (q, k))
        steps = zip(q / q.shape[-2] ** 0.5, k, v, decays[own], b[own].sigmoid(), strict=True)
        for at, (query, key, value, decay, share) in enumerate(steps, own.start):
            state = state * decay
            change = share[:, None, None] * (value[..., None] - state @ key)
            state = state + change @ key.mT
            output[at] = (state @ query)[..., 0]
        for one, new in zip(layer.kv_cache, (inputs[1 - weight.shape[1] :], state), strict=True):
            one[place] = new


SCHEMAS = {
    "prepack_moe_weight(Tensor weight, Tensor(a!) output, str isa) -> ()": packed,
    "cpu_fused_moe(Tensor(a!) output, Tensor x, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2,"
    " Tensor shares, Tensor chosen, bool skip, str name, str isa) -> ()": experts,
    "get_scheduler_metadata(int requests, int heads, int kv_heads, int size, Tensor lengths,"
    " ScalarType dtype, Tensor starts, bool causal, int window, str isa, bool split,"
    " Tensor? dynamic, str cache) -> Tensor": lambda *given: given[4].new_zeros(1),
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor slots, str isa, float k, float v, str cache) -> ()": store_rows,
    "cpu_attention_with_kv_cache(Tensor query, Tensor keys, Tensor values, Tensor(a!) output,"
    " Tensor starts, Tensor lengths, float scale, bool causal, Tensor? alibi, int window,"
    " Tensor tables, float cap, Tensor? schedule, Tensor? sinks, Tensor? dynamic, float k,"
    " float v, str cache) -> ()": attention,
    "silu_and_mul(Tensor! result, Tensor x) -> ()": silu_and_mul,
    "gelu_tanh_and_mul(Tensor! result, Tensor x) -> ()": gelu_tanh_and_mul,
    "rms_norm(Tensor! result, Tensor x, Tensor? weight, float epsilon) -> ()": rms_norm,
    "fused_add_rms_norm(Tensor! x, Tensor! residual, Tensor? weight, float epsilon) -> ()": (
        fused_add_rms_norm
    ),
    "rotary_embedding(Tensor at, Tensor! query, Tensor(a!)? key, int size, Tensor table,"
    " bool is_neox) -> ()": rotary_embedding,
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
}


def stand_in() -> Any:
    """Takes the place of vLLM's compiled module."""
    import torch
    import triton_interpreter

    triton_interpreter.patch_once()
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in SCHEMAS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    torch.ops.vllm.cpu_gdn_attention_core = delta_rule
    names = "_C_stable_libtorch", "model_executor.layers.mamba.ops.cpu.gdn_attention"
    for name in (f"vllm.{one}" for one in names):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[name].register_cpu_gdn_attention_ops = lambda: None  # type: ignore[attr-defined]
    return library


KEPT = stand_in() if CPU else None  # also in processes that vLLM starts


def watched(events: list[Any], accounts: dict[str, Any]) -> None:
    """Note which requests get rows, and how many of their tokens each step computes."""
    from oscar_zoo.engines.vllm.account import Account

    stock = Account.follow

    def follow(self: Any, scheduled: Any, row_of: Any = None) -> None:
        stock(self, scheduled, row_of)
        if row_of is not None:  # a worker, which may be in another process
            accounts["worker"] = self
            return
        accounts["scheduler"] = self
        for new in scheduled.scheduled_new_reqs:
            events.append(["add", new.req_id.partition("-")[0], new.num_computed_tokens])
        for name, number in scheduled.num_scheduled_tokens.items():
            events.append(["step", name.partition("-")[0], number])

    Account.follow = follow


def frozen() -> None:
    """Let decode steps of as many requests share what the first one was given, and refuse a step
    whose tensors lie elsewhere."""
    from oscar_zoo.engines.vllm.backend import Int2Builder

    stock, first = Int2Builder.build, dict[int, Any]()

    def places(made: Any) -> list[int]:
        batch = made.parts[0].batch
        targets, view = batch.targets, batch.view
        read = (*vars(targets).values(), view.kv_indptr, view.kv_indices, view.rows)
        return [one.data_ptr() for one in read]

    def build(self: Any, *given: Any, **named: Any) -> Any:
        made = stock(self, *given, **named)
        if len(made.parts) != 1 or made.parts[0].fill is None:
            return made
        found = first.setdefault(made.parts[0].batch.num_tokens, made)
        assert places(found) == places(made)
        return found

    Int2Builder.build = build


def forked(job: dict[str, Any]) -> None:
    """The ranks are forks, too."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda *_: context("fork")  # type: ignore[assignment]
    main(job)


def main(job: dict[str, Any]) -> None:
    events, accounts = list[Any](), dict[str, Any]()
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    watched(events, accounts)
    own = {"dtype": "float32", "enforce_eager": True} if CPU else {"dtype": "bfloat16"}
    for last in (False, True)[1 - job["before"] :]:
        model = LLM(seed=0, **own, **job["options"])
        if not last:
            del model
            cleanup_dist_env_and_memory()
    events.clear()  # vLLM has warmed up on a GPU
    if CPU and job["frozen"]:
        frozen()
    rule = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
    rounds, drafts = [], []
    for prompts in job["rounds"]:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        for one in model.generate(asked, rule, use_tqdm=False):
            new = list(one.outputs[0].token_ids)
            rounds.append([one.request_id.partition("-")[0], new, one.num_cached_tokens])
        if not job["options"].get("disable_log_stats", True):
            counts = (one for one in model.get_metrics() if "spec_decode" in one.name)
            drafts.append(
                {one.name.rpartition("num_")[2]: getattr(one, "value", 0) for one in counts}
            )
    told: dict[str, Any] = {"requests": rounds, "events": events, "drafts": drafts}
    manager = model.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    told["groups"] = [[one.kv_cache_spec.block_size, len(one.layer_names)] for one in groups]
    if accounts:  # our cache
        sinks = accounts["scheduler"].sinks
        assert accounts.get("worker", accounts["scheduler"]).sinks.counts() == sinks.counts()
        told |= {"sinks": sinks.counts(), "blocks": sinks.num_blocks}
    print(json.dumps(told))


if __name__ == "__main__" and MODE == "-m":
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__")
elif __name__ == "__main__":
    main(json.load(sys.stdin))
