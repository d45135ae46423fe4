"""The program that holds one vLLM engine for `bench serve`: `python -m ... JOB.json`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from oscar_zoo.engines.sglang import offline_process
from oscar_zoo.engines.vllm import compat
from oscar_zoo.engines.vllm.metrics import capacity


class Engine:
    """vLLM's, with as much of the face of SGLang's as a job looks at."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._llm, self._rule = compat.open_engine(arguments)
        self.loop, self._numbers = asyncio.new_event_loop(), itertools.count()
        self.shutdown = self._llm.shutdown
        sizes = SimpleNamespace(vocab_size=self._llm.model_config.get_vocab_size())
        self.tokenizer_manager = SimpleNamespace(model_config=sizes)

    def get_server_info(self) -> dict[str, Any]:
        config = self._llm.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        return {
            "engine": "vllm",
            "version": importlib.metadata.version("vllm"),
            "max_total_num_tokens": capacity(cache),
            "tp_size": config.parallel_config.tensor_parallel_size,
            "internal_states": [{"effective_max_running_requests_per_dp": scheduler.max_num_seqs}],
            "kv_cache_dtype": cache.cache_dtype,
            "dtype": config.model_config.dtype,
            "chunked_prefill_size": scheduler.max_num_batched_tokens,
            "mem_fraction_static": cache.gpu_memory_utilization,
            "max_running_requests": scheduler.max_num_seqs,
            "disable_radix_cache": not cache.enable_prefix_caching,
        }

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> AsyncIterator[dict[str, Any]]:
        most, name = sampling_params["max_new_tokens"], str(next(self._numbers))
        rule = self._rule(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        found = self._llm.generate({"prompt_token_ids": input_ids}, rule, name)
        return (_part(one.outputs[0].token_ids, one.num_cached_tokens) async for one in found)


def _part(ids: Sequence[int], cached: int | None) -> dict[str, Any]:
    meta = {"completion_tokens": len(ids), "cached_tokens": cached}
    return {"output_ids": list(ids), "meta_info": meta}


if __name__ == "__main__":
    offline_process.main(Engine)
