"""Run requests through SGLang Engines and save what came out; see `engines.Engines` for who asks.

A job holds `engine` (keyword arguments) and `groups`; the prompts of a group run at the same time.
A prompt is a list of token ids, or `{"of": [group, index], "append": [...]}`: an earlier prompt,
its answer, and more (a second turn). `refused` is a list of `{"engine": ..., "env": ...}` that must
not start; `probe` looks at the hooks of this process; `memory` counts what is free before and
after. Modes and deliberate bugs are those of `int2_test_plugin`, by the environment.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock


def forked(name: str, spawn: bool) -> None:
    if not spawn:
        fork_workers()
    main(Path(f"{name}.job"), Path(f"{name}.json"))


def fork_workers() -> None:
    """SGLang's workers are forked from here in place of spawned, so they need no imports and have
    our methods."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: choose("fork", force=True)
    # Read from the environment when the module was imported, which was before this job had one.
    for switch in ("TEST_RETRACT", "TEST_RETRACT_INTERVAL"):
        assert hasattr(scheduler, switch)
        setattr(scheduler, switch, getattr(envs, f"SGLANG_{switch}").get())
    scheduler.Scheduler.test_memory = memory


def main(place: Path, out: Path) -> None:
    """Run the job in the file `place` and write what came out to the file `out`."""
    job = json.loads(place.read_text())
    if job.get("drafts"):
        import drafts_on_cpu

        drafts_on_cpu.install(**job["drafts"])
    import sglang

    result: dict[str, Any] = {"version": sglang.__version__, "groups": {}}
    result["refused"] = [refusal(one) for one in job.get("refused", ())]
    if job.get("probe"):
        result["probe"] = probe()
        result["pool"] = pool_contract()
    if job.get("heads"):
        result["heads"] = head_assignment()
    events = Events(job["engine"]) if "kv_events_config" in job["engine"] else None
    began = time.time()
    engine = sglang.Engine(**job["engine"])
    result["up"] = round(time.time() - began, 1)
    try:
        if events is not None:
            events.take(1000)  # ZeroMQ subscribes while somebody waits
        result["memory"] = [left(engine, out)] if job.get("memory") else []
        for group in job["groups"]:
            result["groups"][group["name"]] = run(engine, group, result["groups"])
            if events is not None:
                result["groups"][group["name"]]["events"] = events.take()
        if job.get("image"):
            result["image"] = image(engine)
        if job.get("memory"):
            empty(engine)
            result["memory"].append(left(engine, out))
        # With data parallelism SGLang has no way to call all of its schedulers.
        if job["engine"].get("kv_cache_dtype") == "int2" and job["engine"].get("dp_size", 1) == 1:
            engine.collective_rpc("oscar_report", path=str(out))
        if job["engine"].get("enable_metrics"):
            result["metrics"] = scrape()
        result["info"] = [
            one.get("oscar_int2") for one in engine.get_server_info()["internal_states"]
        ]
    finally:
        engine.shutdown()
    reports = out.parent.glob(out.name + ".*.json")
    result["reports"] = [json.loads(path.read_text()) for path in sorted(reports)]
    out.write_text(json.dumps(result))


class Events:
    """What the engine publishes of the pages that it holds."""

    def __init__(self, engine: dict[str, Any]) -> None:
        import zmq

        self._socket, self._seen = zmq.Context().socket(zmq.SUB), 0
        self._socket.subscribe("")
        place = "tcp://127.0.0.1"
        place = f"{place}:{self._socket.bind_to_random_port(place)}"
        engine["kv_events_config"] = json.dumps({"publisher": "zmq", "endpoint": place})

    def take(self, patience: int = 300) -> list[dict[str, Any]]:
        """All that came since this was called last, until nothing comes for so many ms."""
        import msgspec
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        found, decoder = [], msgspec.msgpack.Decoder(KVEventBatch)
        while self._socket.poll(patience):
            _, number, payload = self._socket.recv_multipart()
            number = int.from_bytes(number, "big")  # the start of the server has some of its own
            assert not self._seen or number == self._seen + 1, "one was lost"
            self._seen = number
            for event in decoder.decode(payload).events:
                fields = {name: getattr(event, name) for name in event.__struct_fields__}
                found.append({"kind": type(event).__name__, **fields})
        return found


def run(engine: Any, group: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """All prompts of a group at once; `abort` names those that are given up, and after how many
    tokens, and `salt` is that of all."""
    prompts = [resolve(prompt, earlier) for prompt in group["prompts"]]
    new = group["new"] if isinstance(group["new"], list) else [group["new"]] * len(prompts)
    sampling = [{"temperature": 0, "max_new_tokens": number, "ignore_eos": True} for number in new]
    began = time.time()
    if "abort" in group:
        answers = engine.loop.run_until_complete(streams(engine, prompts, sampling, group["abort"]))
    else:
        more = {"cache_salt": group["salt"]} if "salt" in group else {}
        answers = engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=True, **more
        )
    return {
        "prompts": prompts,
        "tokens": [answer["output_ids"] for answer in answers],
        # a request that is given up while it waits again has no such number
        "cached": [answer["meta_info"].get("cached_tokens", 0) for answer in answers],
        "logprobs": [
            [value for value, *_ in answer["meta_info"].get("output_token_logprobs", ())]
            for answer in answers
        ],
        "steps": [answer["meta_info"].get("spec_verify_ct") for answer in answers],
        "ended": [(answer["meta_info"]["finish_reason"] or {}).get("type") for answer in answers],
        "seconds": round(time.time() - began, 2),
    }


def image(engine: Any) -> str:
    try:
        engine.generate(input_ids=[1, 2], image_data="nothing.png")
    except ValueError as error:
        return str(error)
    return "nothing"


async def streams(
    engine: Any, prompts: list[Any], sampling: list[Any], abort: dict[str, int]
) -> list[dict[str, Any]]:
    """Answers as streams, of which some are aborted after a number of tokens."""

    async def one(index: int) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        stream = await engine.async_generate(
            input_ids=prompts[index], sampling_params=sampling[index], stream=True
        )
        async for answer in stream:
            if len(answer["output_ids"]) >= abort.get(str(index), 1 << 30):
                engine.tokenizer_manager.abort_request(answer["meta_info"]["id"])
        return answer

    return list(await asyncio.gather(*map(one, range(len(prompts)))))


def scrape() -> list[dict[str, Any]]:
    """What `/metrics` would show of our metrics and of SGLang's tokens in use, once no request has
    a row any more."""
    from prometheus_client import CollectorRegistry, multiprocess

    deadline = time.monotonic() + 300
    while True:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        samples = [
            {"name": sample.name, "labels": sample.labels, "value": sample.value}
            for family in registry.collect()
            for sample in family.samples
            if sample.name.startswith(("oscar_", "sglang:kv_", "sglang:hicache_", "sglang:load_"))
        ]
        rows = [one["value"] for one in samples if one["name"] == "oscar_int2_used_ring_rows"]
        if time.monotonic() > deadline or (rows and not any(rows)):
            return samples
        time.sleep(0.2)


def resolve(prompt: Any, groups: dict[str, Any]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    group, index = prompt["of"]
    earlier = groups[group]
    return [*earlier["prompts"][index], *earlier["tokens"][index], *prompt["append"]]


def refusal(job: dict[str, Any]) -> str:
    import sglang

    with mock.patch.dict(os.environ, job.get("env", {})):
        try:
            engine = sglang.Engine(**job["engine"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    engine.shutdown()
    return ""


def probe() -> dict[str, Any]:
    """Do the targets of the hooks exist, are they patched, and does the command line know our
    flags?"""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from oscar_zoo.engines.sglang.compat import hook_targets

    load_plugins()
    paths = [path for _, _, path in hook_targets.targets()]
    found, patched = [], list[str]()
    for path in dict.fromkeys(paths):
        module, owner, name = path.rsplit(".", 2)
        holder = getattr(importlib.import_module(module), owner) if owner[0].isupper() else None
        holder = holder or importlib.import_module(f"{module}.{owner}")
        there = getattr(holder, name, None)
        found.append((path, callable(there)))
        if callable(there) and there.__code__.co_filename == hook_targets.__file__:
            patched.append(path)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with mock.patch.dict(os.environ):
        given = (
            ["--model-path=x", "--kv-cache-dtype=int2", "--oscar-sink-size=3"] if patched else []
        )
        args = parser.parse_args(given or ["--model-path=x"])
        written = os.environ.get("OSCAR_INT2_SINK_SIZE")
    return {
        "missing": [path for path, there in found if not there],
        "patched": sorted(patched),
        "unpatched": sorted(set(paths) - set(patched)),
        "dtype": args.kv_cache_dtype,
        "written": written,
        "attribute": hasattr(args, "oscar_sink_size"),
    }


def memory(scheduler: Any, path: str) -> None:
    """A method for `collective_rpc`: what is free and what the prefix cache holds, in tokens and
    request rows."""
    counts = {
        "tokens": scheduler.token_to_kv_pool_allocator.available_size(),
        "rows": scheduler.req_to_token_pool.available_size(),
        "kept": scheduler.tree_cache.evictable_size(),
        "locked": scheduler.tree_cache.protected_size(),
        "table_bytes": table_bytes(),
        "storage": storage(scheduler.tree_cache),
        "states": states(scheduler.req_to_token_pool),
    }
    Path(path).write_text(json.dumps(counts))


def storage(tree: Any) -> list[Any]:
    """What SGLang says to a storage backend that is asked for at this late time."""
    if getattr(tree, "cache_controller", None) is None:
        return []
    return list(tree.attach_storage_backend("file"))


def states(rows: Any) -> list[int]:
    """State slots of a hybrid model without the padding slot, and bytes of all; empty for other
    models."""
    pool = getattr(rows, "mamba_pool", None)
    if pool is None:
        return []
    cache = pool.mamba_cache
    return [pool.size, sum(one.nbytes for one in (*cache.conv, cache.temporal))]


def table_bytes() -> float:
    """Bytes per token of the tables of SGLang's eager runner, which are at least as long as there
    are token slots."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry

    registries = [one for one in gc.get_objects() if type(one) is CudaGraphBufferRegistry]
    largest = max(registries, key=lambda registry: registry.max_num_tokens)
    tables = [slot.buffer for slot in largest._slots.values() if slot.buffer is not None]
    long = [table for table in tables if largest.max_num_tokens in table.shape]
    return sum(table.numel() * table.element_size() for table in long) / largest.max_num_tokens


def empty(engine: Any) -> None:
    """Drop what the prefix cache holds, as soon as the scheduler has nothing left to do."""
    for _ in range(3000):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise AssertionError("the scheduler did not become idle")


def left(engine: Any, out: Path) -> dict[str, float]:
    place = out.with_suffix(".memory")
    engine.collective_rpc("test_memory", path=str(place))
    counts: dict[str, float] = json.loads(place.read_text())
    return counts


def head_assignment() -> list[dict[str, Any]]:
    """Which global KV heads a rank loads in SGLang's own projection, and which ones we slice
    transforms for."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig

    from oscar_zoo.engines.sglang.compat import geometry

    found = []
    for kv_heads, size in itertools.product((2, 4, 8), (1, 2, 4, 8)):
        config = ModelConfig.__new__(ModelConfig)
        config.is_draft_model = False
        config.get_total_num_kv_heads = lambda kv_heads=kv_heads: kv_heads
        for rank in range(size):
            parallel = types.SimpleNamespace(attn_tp_size=size, attn_tp_rank=rank)
            with mock.patch.object(
                runtime_context, "get_parallel", lambda parallel=parallel: parallel
            ):
                ours = list(geometry.local_kv_heads(config))
            k, v = loaded_heads(kv_heads, size, rank)
            found.append(
                {"kv_heads": kv_heads, "size": size, "rank": rank, "k": k, "v": v, "ours": ours}
            )
    return found


def loaded_heads(kv_heads: int, size: int, rank: int) -> list[list[int]]:
    """The KV heads that SGLang's weight loader takes for a rank: of K, and of V."""
    import torch
    from sglang.srt.layers import linear

    labels = torch.arange(kv_heads).float().repeat_interleave(4)[:, None].expand(-1, 3)
    group = types.SimpleNamespace(rank_in_group=rank, world_size=size)
    asked = inspect.signature(linear.QKVParallelLinear).parameters
    given = (
        {"tp_rank": rank, "tp_size": size} if "tp_rank" in asked else {}
    )  # from 0.5.23 on it asks for the group
    with mock.patch.object(linear, "_resolve_linear_group", lambda _: group, create=bool(given)):
        layer = linear.QKVParallelLinear(3, 4, 8, kv_heads, bias=False, **given)
    for side in "kv":
        layer.weight.weight_loader(layer.weight, labels, side)
    rows = layer.weight[layer.num_heads * 4 :, 0].view(2, -1, 4).int()
    assert (rows == rows[..., :1]).all()
    return [side[:, 0].tolist() for side in rows]


def pool_contract() -> dict[str, Any]:
    """A pool on its own: what it counts, what it shows of itself, and what it refuses."""
    import torch

    from oscar_kernels.spec import QuantSpec
    from oscar_zoo.engines.sglang.pool import Int2TokenPool
    from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore

    spec = QuantSpec(64, 64, 0.96)
    stock = {
        "dtype": torch.uint8,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": 0,
        "end_layer": 2,
    }
    pool = Int2TokenPool(
        32,
        page_size=4,
        head_num=2,
        head_dim=64,
        v_head_dim=64,
        layer_num=3,
        slot_shape=SlotShape.alike(3, 0, 2, spec, spec),
        window_shape=WindowShape(3, 5, 2, 64, 64, 4, 8, torch.float32),
        make_stores=lambda slots, windows, device: (
            SlotStore(slots, device),
            WindowStore(windows, device),
        ),
        **stock,
    )
    refused = {}
    forbidden = ("set_kv_buffer", "get_cpu_copy", "load_cpu_copy", "get_contiguous_buf_infos")
    for name in (*forbidden, "set_kv_buffer_prefix_valid"):
        try:
            getattr(pool, name)()
        except NotImplementedError as error:
            refused[name] = str(error)
    pool.k_buffer[2][7] = 9
    pool.v_buffer[1][7] = 3.0
    pool.move_kv_cache(torch.tensor([11]), torch.tensor([7]))
    return {
        "bytes": sum(pool.get_kv_size_bytes()),
        "allocated": pool.slots.nbytes + pool.windows.nbytes,
        "slots": pool.k_buffer[0].shape[0],
        "probes": [
            list(t.shape)
            for t in (*pool.get_kv_buffer(0), pool.get_key_buffer(1), pool.get_value_buffer(2))
        ],
        "moved": bool((pool.k_buffer[2][11] == 9).all() and (pool.v_buffer[1][11] == 3.0).all()),
        "refused": refused,
        "fused_write": {"ours": fused_write(pool), "bfloat16": fused_write(bfloat16_pool())},
    }


def bfloat16_pool() -> Any:
    """As much of a stock pool as SGLang looks at before it writes keys from inside the rotary
    embedding."""
    import torch

    return types.SimpleNamespace(dtype=torch.bfloat16)


def fused_write(pool: Any) -> bool:
    """Whether SGLang on CUDA would write keys into `pool` from inside the rotary embedding of a
    model."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models import utils

    backend = types.SimpleNamespace(token_to_kv_pool=pool)
    alone = {"is_cp_active": lambda _: False, "is_prefill_context_parallel_enabled": lambda: False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(utils, "_is_cuda", True))
        for name, answer in alone.items():
            if hasattr(utils, name):
                stack.enter_context(mock.patch.object(utils, name, answer))
        stack.enter_context(forward_context(ForwardContext(attn_backend=backend)))
        return bool(utils.enable_fused_set_kv_buffer(types.SimpleNamespace()))
