"""The front of a server, which also stands in front of vLLM: `--middleware` puts it there."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any, cast

from oscar_zoo.engines import setting_flags, settings
from oscar_zoo.engines.setting_flags import one_or_text
from oscar_zoo.engines.sglang.front import access, fields
from oscar_zoo.engines.sglang.front.access import FrontSettings, Routes
from oscar_zoo.engines.sglang.front.messages import Connections, Receive, Send
from oscar_zoo.engines.sglang.front.middleware import Front


class InFront:
    """Who asks must get past it; its settings are in the file that the variable names."""

    def __init__(self, app: Any) -> None:
        chosen = FrontSettings.read(Path(os.environ[setting_flags.OPTIONS["front"].variable]))
        facts = {
            "front": chosen.id,
            "vllm": importlib.metadata.version("vllm"),
            "needs_key": chosen.key is not None,
        }
        routes, self._state = Routes.of(access.VLLM), cast(Any, None)
        self._front = Front(app, chosen, routes, facts, also=fields.OF_VLLM, live=self._cache)
        Connections().bound_all()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if "app" in scope:
            self._state = scope["app"].state
        await self._front(scope, receive, send)

    def _cache(self) -> dict[str, Any]:
        """`cache`, the other fields of `ServerFacts`."""
        config = self._state.vllm_config
        cache, scheduler, chosen = config.cache_config, config.scheduler_config, read_settings()
        longest, pages = config.model_config.max_model_len, cache.num_gpu_blocks - 1
        told = {
            "cache_dtype": "int2",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": str(config.device_config.device_type),
            "chunk": min(longest, scheduler.max_num_batched_tokens),
            "page_size": cache.block_size,
            "radix": bool(cache.enable_prefix_caching),
            "tp": 1,
            "capacity": cache.block_size * pages,
            "longest_input": longest,
            "recipe": {
                "sink": chosen.sink,
                "recent": chosen.recent,
                "bits": str(chosen.bits),
                "k_clip": one_or_text(chosen.k_clip),
                "v_clip": one_or_text(chosen.v_clip),
            },
        }
        return {"cache": told}


def read_settings() -> settings.PluginSettings:
    """Those of the variables; what an artifact's recipe says is not looked up."""
    mine = {name: text for name, text in os.environ.items() if name.startswith(settings.PREFIXES)}
    return settings.read_settings(mine)
