"""Run requests through one SGLang Engine and save what came out: `python engine_child.py JOB.json OUT.json`.

A job holds `engine` (keyword arguments) and `groups`; the prompts of a group run at the same time. A prompt is a list
of token ids, or `{"of": [group, index], "append": [...]}`: an earlier prompt, its answer, and more (a second turn).
`refused` is a list of `{"engine": ..., "env": ...}` that must not start; `probe` looks at the hooks of this process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import sglang

    result: dict[str, Any] = {"version": sglang.__version__, "groups": {}}
    result["refused"] = [refusal(one) for one in job.get("refused", ())]
    if job.get("probe"):
        result["probe"] = probe()
        result["pool"] = pool_contract()
    began = time.time()
    engine = sglang.Engine(**job["engine"])
    result["up"] = round(time.time() - began, 1)
    try:
        for group in job["groups"]:
            result["groups"][group["name"]] = run(engine, group, result["groups"])
        if job["engine"].get("kv_cache_dtype") == "int2":
            engine.collective_rpc("oscar_report", path=str(out))
        if job["engine"].get("enable_metrics"):
            result["metrics"] = scrape()
        result["info"] = [state.get("oscar_int2") for state in engine.get_server_info()["internal_states"]]
    finally:
        engine.shutdown()
    reports = out.parent.glob(out.name + ".*.json")
    result["reports"] = [json.loads(path.read_text()) for path in sorted(reports)]
    out.write_text(json.dumps(result))


def run(engine: Any, group: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    prompts = [resolve(prompt, earlier) for prompt in group["prompts"]]
    sampling = {"temperature": 0, "max_new_tokens": group["new"], "ignore_eos": True}
    began = time.time()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    return {
        "prompts": prompts,
        "tokens": [answer["output_ids"] for answer in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
        "logprobs": [[value for value, *_ in answer["meta_info"]["output_token_logprobs"]] for answer in answers],
        "seconds": round(time.time() - began, 2),
    }


def scrape() -> list[dict[str, Any]]:
    """What `/metrics` would show of our metrics and of SGLang's tokens in use, once no request has a row any more."""
    from prometheus_client import CollectorRegistry, multiprocess

    deadline = time.monotonic() + 60
    while True:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        samples = [
            {"name": sample.name, "labels": sample.labels, "value": sample.value}
            for family in registry.collect()
            for sample in family.samples
            if sample.name.startswith(("oscar_", "sglang:kv_"))
        ]
        rows = [sample["value"] for sample in samples if sample["name"] == "oscar_int2_used_ring_rows"]
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
    """What an Engine that must not start says."""
    import sglang

    with mock.patch.dict(os.environ, job.get("env", {})):
        try:
            engine = sglang.Engine(**job["engine"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    engine.shutdown()
    return ""


def probe() -> dict[str, Any]:
    """Do the targets of the hooks exist, are they patched, and does the command line know our flags?"""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    from oscar_zoo.sglang_plugin import compat

    load_plugins()
    paths = [place.path for places in compat.targets().values() for place in places]
    found = []
    for path in paths:
        module, owner, name = path.rsplit(".", 2)
        holder = getattr(importlib.import_module(module), owner) if owner[0].isupper() else None
        holder = holder or importlib.import_module(f"{module}.{owner}")
        found.append(callable(getattr(holder, name, None)))
    patched = sorted(set(paths) & set(HookRegistry._patched))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with mock.patch.dict(os.environ):
        given = ["--model-path=x", "--kv-cache-dtype=int2", "--oscar-sink-size=3"] if patched else []
        args = parser.parse_args(given or ["--model-path=x"])
        written = os.environ.get("OSCAR_INT2_SINK_SIZE")
    return {
        "missing": [path for path, there in zip(paths, found, strict=True) if not there],
        "patched": patched,
        "unpatched": sorted(set(paths) - set(patched)),
        "dtype": args.kv_cache_dtype,
        "written": written,
        "attribute": hasattr(args, "oscar_sink_size"),
    }


def pool_contract() -> dict[str, Any]:
    """A pool on its own: what it counts, what it shows of itself, and what it refuses."""
    import torch

    from oscar_kernels.spec import QuantSpec
    from oscar_zoo.sglang_plugin.pool import Int2TokenPool
    from oscar_zoo.sglang_plugin.side_store import SideShape
    from oscar_zoo.sglang_plugin.slot_store import SlotShape

    spec = QuantSpec(64, 64, 0.96)
    stock = {"dtype": torch.uint8, "device": "cpu", "enable_memory_saver": False, "start_layer": 0, "end_layer": 2}
    pool = Int2TokenPool(
        32,
        page_size=4,
        head_num=2,
        head_dim=64,
        v_head_dim=64,
        layer_num=3,
        slot_shape=SlotShape(3, 0, 2, spec, spec),
        side_shape=SideShape(3, 5, 2, 64, 64, 4, 8, torch.float32),
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
        "allocated": pool.slots.nbytes + pool.side.nbytes,
        "slots": pool.k_buffer[0].shape[0],
        "probes": [list(t.shape) for t in (*pool.get_kv_buffer(0), pool.get_key_buffer(1), pool.get_value_buffer(2))],
        "moved": bool((pool.k_buffer[2][11] == 9).all() and (pool.v_buffer[1][11] == 3.0).all()),
        "refused": refused,
    }


if __name__ == "__main__":
    main()
