"""Read command lines as `python -m sglang.launch_server` does, many in one fork of `sglang_forks`.

A case is `{"argv": [...], "env": {...}}`. Nothing is started; an answer says what was decided, or
what was refused.
"""

import argparse
import contextlib
import importlib
import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cache_oracle import PlainPrefill


def read(cases: list[dict[str, Any]], out: str) -> None:
    """Answers to all `cases`, and the flags of this version; JSON in the file `out`."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    flags = sorted(_parser()._option_string_actions)
    Path(out).write_text(json.dumps({"flags": flags, "cases": [answer(case) for case in cases]}))


def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def answer(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    from oscar_zoo.engines.sglang import compile_ahead, worker
    from oscar_zoo.engines.sglang.compat import server_arguments
    from oscar_zoo.errors import OscarZooError

    worker.served.cache_clear()
    with mock.patch.dict(os.environ, case["env"]):
        try:
            args = prepare_server_args(case["argv"])
            if hasattr(args, "resolve_once"):
                args.resolve_once()
            args.check_server_args()  # as the engine does in front of its workers
            config = server_arguments.resolved(args)
            chosen, artifact = worker.served()
            ahead = json.loads(compile_ahead.request(args, config).model_dump_json())
        except OscarZooError as error:
            return {"error": error.message, "hint": error.hint}
        except SystemExit as error:
            return {"error": f"exit {error.code}", "hint": None}
        return {
            "digest": artifact.digest,
            "copy_digest": artifact.copy_digest,
            "settings": chosen.describe(),
            "warnings": chosen.warnings,
            "backend": config.attention_backend,
            "backends": [
                getattr(config, f"{phase}attention_backend")
                for phase in ("", "prefill_", "decode_")
            ],
            "where": artifact.where,
            "tp": config.tp_size,
            "ahead": ahead,
            "graphs": [config.cuda_graph_backend_decode, config.cuda_graph_backend_prefill],
        }


def names(out: str) -> None:
    """Which of the names in the table of releases this SGLang has; JSON in the file `out`."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from oscar_zoo.engines.sglang.compat.releases import ALLOCATE_ROWS, RESOLVE

    places = ((RESOLVE, ServerArgs), (ALLOCATE_ROWS, ReqToTokenPool))
    Path(out).write_text(json.dumps([row.name(place) for row, place in places]))


def decode_graph(out: str) -> None:
    """Capture before any request, then replay without and with the hook that watches rows."""
    from oscar_zoo.engines.sglang import worker

    backend, calls = _backend()
    batch = _decode_batch(rows=[1, 2])
    assert "alloc" not in worker.FIRED
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    _noting_refusal(calls, backend.init_forward_metadata_out_graph, batch)
    worker.FIRED.add("alloc")
    backend.init_forward_metadata_out_graph(batch)
    Path(out).write_text(json.dumps(calls))


def eager_warm_up(out: str) -> None:
    """A pass of padding rows before any request, as for FlashInfer's autotune, then rows of
    requests."""
    from oscar_zoo.engines.sglang import worker

    backend, calls = _backend()
    assert "alloc" not in worker.FIRED
    _noting_refusal(calls, backend.init_forward_metadata, _decode_batch(rows=[0, 0]))
    _noting_refusal(calls, backend.init_forward_metadata, _decode_batch(rows=[0, 1]))
    Path(out).write_text(json.dumps(calls))


def _backend() -> tuple[Any, list[str]]:
    from oscar_zoo.engines.sglang.backend import OscarAttentionBackend

    calls: list[str] = []
    backend: Any = object.__new__(OscarAttentionBackend)
    windows = SimpleNamespace(fresh=set())
    backend.pool = SimpleNamespace(device="cuda:0", windows=windows, layer_transfer_counter=None)
    backend.cache = SimpleNamespace(
        begin=lambda step: calls.append(f"begin {step.kind}"),
        refill=lambda step: calls.append(f"refill {step.kind}"),
    )
    return backend, calls


def _decode_batch(rows: list[int]) -> Any:
    numbers = torch.tensor(rows)
    return SimpleNamespace(
        req_pool_indices=numbers,
        seq_lens=numbers,
        out_cache_loc=numbers,
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_target_verify=lambda: False),
    )


def _noting_refusal(calls: list[str], call: Any, batch: Any) -> None:
    from oscar_zoo.errors import ServerFailed

    try:
        call(batch)
    except ServerFailed as error:
        calls.append(type(error).__name__)


HEADS, GROUP, CACHED = 2, 4, 70
LENGTHS = (37, 1, 0, 5)
"""New tokens of the requests of a pass."""


def differences(widths: list[tuple[int, int]], out: str) -> None:
    """Largest differences of a pass over new tokens, of one over cached tokens, and of both merged,
    by the channels of K and V; JSON in the file `out`."""
    Path(out).write_text(json.dumps([_of(k, v) for k, v in widths]))


def _of(k_dim: int, v_dim: int) -> list[float]:
    from oscar_zoo.engines.sglang.compat.backends import TritonPrefill
    from oscar_zoo.runtime.engine import Softmax

    draw = torch.Generator().manual_seed(3)
    softmax = Softmax(k_dim**-0.5, cap=3.0)

    def rows(count: int, heads: int, dim: int) -> torch.Tensor:
        fused = torch.randn(count, heads, 2 * dim, generator=draw)
        return fused[..., :dim]  # rows of a joint projection are not adjacent

    q = rows(sum(LENGTHS), HEADS * GROUP, k_dim)
    new, cached = ((rows(n, HEADS, k_dim), rows(n, HEADS, v_dim)) for n in (len(q), CACHED))
    ends = list(accumulate(LENGTHS))
    batch: Any = SimpleNamespace(
        qo_indptr=torch.tensor([0, *ends], dtype=torch.int32),
        extend_lens=LENGTHS,
        spans=[slice(e - n, e) for e, n in zip(ends, LENGTHS, strict=True)],
    )
    results = []
    for prefill in (PlainPrefill(), TritonPrefill()):
        prefill.begin(batch)
        chunk = prefill.chunk(q, *new, batch, softmax)
        whole = prefill.whole(q, *cached, softmax)
        parts = (chunk, whole, prefill.merge(chunk, whole))
        results.append([(out, lse * prefill.lse_unit) for out, lse in parts])
    return [
        float((mine - theirs).abs().max())
        for one, other in zip(*results, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    ]


CLASSES = {
    "falcon_h1": ("falcon_h1", "FalconH1Config"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridConfig"),
    "lfm2": ("lfm2", "Lfm2Config"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeConfig"),
    "nemotron_h": ("nemotron_h", "NemotronHConfig"),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeTextConfig"),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig"),
}
"""By model type: module in `sglang.srt.configs`, and class."""


def state_bytes(configs: dict[str, dict[str, Any]], out: str) -> None:
    """Of every configuration: bytes of the states of one slot on one GPU, and layers that have one;
    JSON in the file `out`."""
    from sglang.srt import runtime_context

    one: dict[str, Any] = {"attn_tp_size": 1}
    if hasattr(runtime_context, "linear_attn_tp_size"):  # SGLang 0.5.23 and later
        one["enable_cp_tp_group_sharing"] = False
    found: dict[str, list[int]] = {}
    with runtime_context.get_parallel().override(**one):
        for name, values in configs.items():
            module, kind = CLASSES[values["model_type"]]
            made = getattr(importlib.import_module(f"sglang.srt.configs.{module}"), kind)
            given = {key: value for key, value in values.items() if key != "model_type"}
            states = made(**given).mamba2_cache_params
            found[name] = [int(states.mamba_cache_per_req), len(states.layers)]
    Path(out).write_text(json.dumps(found))


def full_layers(folders: dict[str, str], out: str) -> None:
    """Of every folder with a `config.json`: layers, KV heads, head_dim of K and of V; JSON in the
    file `out`. A model that is refused has a sentence."""
    from sglang.srt.configs.model_config import ModelConfig

    from oscar_zoo.engines.sglang import refusals
    from oscar_zoo.engines.sglang.compat import geometry
    from oscar_zoo.errors import OscarZooError

    found: dict[str, object] = {}
    for name, folder in folders.items():
        model = ModelConfig(model_path=folder)
        try:
            refusals.check_model(model)
        except OscarZooError as error:
            found[name] = error.message
            continue
        heads = model.get_total_num_kv_heads()
        layers = list(geometry.full_layers(model))
        found[name] = [layers, heads, model.head_dim, model.v_head_dim]
    Path(out).write_text(json.dumps(found))


def collect(cases: dict[str, Any], out: str) -> None:
    """What is said to each; `null` where the parser of this version does not know the flag. JSON in
    the file `out`.

    In a fork of `sglang_forks`, without the plugin's hooks.
    """
    parser = _parser()
    said = {
        "flags": {row: flag(parser, argv) for row, argv in cases["flags"].items()},
        "models": {row: model(folder) for row, folder in cases["models"].items()},
        "layers": {row: layer(attributes) for row, attributes in cases["layers"].items()},
    }
    Path(out).write_text(json.dumps(said))


def flag(parser: argparse.ArgumentParser, argv: list[str]) -> str | None:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from oscar_zoo.engines.sglang import refusals

    if any(word not in parser._option_string_actions for word in argv if word.startswith("--")):
        return None
    args = parser.parse_args(["--model-path=x", *argv])
    args.device = "cuda"
    # SGLang folds the flags of both phases into this object when it resolves its arguments.
    args.cuda_graph_config = CudaGraphConfig(
        prefill=PhaseConfig(backend=args.cuda_graph_backend_prefill)
    )
    return complaint(lambda: refusals.check_server(args, {}, eager_only=False))


def model(folder: str) -> str:
    from sglang.srt.configs.model_config import ModelConfig

    from oscar_zoo.engines.sglang import refusals

    config = ModelConfig(model_path=folder)
    return complaint(lambda: refusals.check_model(config))


def layer(attributes: dict[str, Any]) -> str:
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    from oscar_zoo.engines.sglang import refusals

    assigned = {key: attributes.pop(key) for key in ("xai_temperature_len",) if key in attributes}
    if "attn_type" in attributes:
        attributes["attn_type"] = AttentionType(attributes["attn_type"])
    built = RadixAttention(
        num_heads=2, head_dim=64, scaling=1.0, num_kv_heads=1, layer_id=0, **attributes
    )
    for name, value in assigned.items():
        getattr(built, name)
        setattr(built, name, value)
    return complaint(lambda: refusals.check_attention([built]))


def complaint(check: Callable[[], None]) -> str:
    from oscar_zoo.errors import OscarZooError

    try:
        check()
    except OscarZooError as error:
        return error.message
    return ""


STEP = 64


def saved_places(cases: list[dict[str, Any]], out: str) -> None:
    """For every case, the place that each of its passes saves; JSON in the file `out`.

    A case has `length` (tokens of the prompt), `passes` (their ends), `prefix` (cached tokens),
    `branch` (a place that SGLang found itself) and `recent`.
    """
    with configuration():
        found = [passes(**case) for case in cases]
    Path(out).write_text(json.dumps(found))


def passes(length: int, passes: list[int], prefix: int, branch: int | None, recent: int) -> Any:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from oscar_zoo.engines.sglang.compat import scheduling

    rows = SimpleNamespace(
        enable_mamba_extra_buffer=True, get_mamba_ping_pong_other_idx=lambda index: 1 - index
    )
    tree = SimpleNamespace(page_size=1, req_to_token_pool=rows)
    batch = SimpleNamespace(
        req_to_token_pool=rows,
        tree_cache=tree,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
    )
    request = SimpleNamespace(
        origin_input_ids=range(length),
        output_ids=(),
        mamba_branching_seqlen=branch,
        mamba_ping_pong_track_buffer=torch.tensor([3, 4]),
        mamba_next_track_idx=0,
    )
    request.kv = request  # where these numbers are depends on the release
    found = []
    for number, end in enumerate(passes):
        request.prefix_indices, request.prefix_len = range(prefix), prefix
        request.extend_range = SimpleNamespace(length=end - prefix)
        request.extend_len, request.extend_end = end - prefix, end
        if number == 0:
            scheduling.save_early(request, tree, recent)
        else:
            scheduling.name_place(request)
        request.mamba_last_track_seqlen = None
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, request)
        found.append(request.mamba_last_track_seqlen)
        prefix = end
    return found


@contextlib.contextmanager
def configuration() -> Any:
    """A server with an extra buffer of states, one token per page."""
    from sglang.srt import runtime_context
    from sglang.srt.managers import schedule_batch

    args = SimpleNamespace(
        mamba_cache_chunk_size=STEP, enable_mamba_extra_buffer_lazy=lambda: False
    )
    values = {
        "get_server_args": lambda: args,
        "mamba_cache_chunk_size": lambda: STEP,
        "get_exec": lambda: SimpleNamespace(
            mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False)
        ),
        "get_parallel": lambda: SimpleNamespace(dcp_enabled=False),
    }
    with contextlib.ExitStack() as stack:
        for module in (runtime_context, schedule_batch):
            for name, value in values.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


NAME = "oscar_int2"


def wrapped(out: str) -> None:
    """What SGLang's function says to our name, with and without our hook, and the names that the
    runner has afterwards; JSON in the file `out`."""
    import sglang.srt.utils as utils
    from sglang.srt.layers.attention import attention_registry as registry
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear import utils as linear

    from oscar_zoo.engines.sglang.compat import backends

    args = SimpleNamespace(
        attention_backend=NAME, prefill_attention_backend=None, decode_attention_backend=None
    )
    config = SimpleNamespace(full_attention_layer_ids=[1, 3], architectures=None)
    runner = SimpleNamespace(
        server_args=args,
        prefill_attention_backend_str=NAME,
        decode_attention_backend_str=NAME,
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config, quantization=None),
        use_mla_backend=False,
        is_draft_worker=False,
    )
    nothing = mock.Mock(return_value=None)
    gpu = {
        (utils, "is_blackwell"): lambda: True,
        (registry, "mambaish_config"): lambda _: config,
        (registry, "hybrid_gdn_config"): lambda _: config,
        (gdn_backend, "GDNAttnBackend"): lambda _: "linear",
        (gdn_backend, "flashinfer_gdn_prefill_default"): nothing,
        (linear, "initialize_linear_attn_config"): nothing,
        (linear, "resolve_linear_attn_backends"): nothing,
        (hybrid, "HybridLinearAttnBackend"): lambda *parts: parts,
    }
    said: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for (module, name), value in gpu.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))
        said["ours"] = backends.wrap(registry.attn_backend_wrapper, runner, "full")
        try:
            registry.attn_backend_wrapper(runner, "full")
        except AssertionError as error:
            said["without"] = str(error)
    said["names"] = [
        runner.server_args.attention_backend,
        runner.prefill_attention_backend_str,
        runner.decode_attention_backend_str,
    ]
    Path(out).write_text(json.dumps(said))
