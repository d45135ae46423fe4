"""The front of a server, which also stands in front of vLLM: `--middleware` puts it there."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any, cast

from oscar_zoo.engines import setting_flags, settings
from oscar_zoo.engines.metrics import recipe_of
from oscar_zoo.engines.sglang.front import access, fields
from oscar_zoo.engines.sglang.front.access import FrontSettings, Routes
from oscar_zoo.engines.sglang.front.messages import Connections, Receive, Send
from oscar_zoo.engines.sglang.front.middleware import Front
from oscar_zoo.engines.vllm.metrics import PATHS, Metrics, capacity


class InFront:
    """Who asks must get past it; its settings are in the file that the variable names."""

    def __init__(self, app: Any) -> None:
        chosen = FrontSettings.read(Path(os.environ[setting_flags.OPTIONS["front"].variable]))
        version, needs_key = importlib.metadata.version("vllm"), chosen.key is not None
        facts = {"front": chosen.id, "vllm": version, "needs_key": needs_key}
        self._app, self._state = app, cast(Any, None)
        self._metrics: Metrics | None = None
        routes = Routes.of(access.VLLM)
        self._front = Front(
            self._measured, chosen, routes, facts, also=fields.OF_VLLM, live=self._cache
        )
        Connections().bound_all()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if "app" in scope:
            self._state = scope["app"].state
        await self._front(scope, receive, send)

    async def _measured(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """vLLM's application, behind the front."""
        if scope.get("path") in PATHS:
            self._metrics = self._metrics or Metrics(self._state)
            await self._metrics.refresh()
        await self._app(scope, receive, send)

    def _cache(self) -> dict[str, Any]:
        """`cache`, the other fields of `ServerFacts`."""
        config, own = self._state.vllm_config, settings.PREFIXES
        cache, scheduler = config.cache_config, config.scheduler_config
        chosen = settings.read_settings({k: v for k, v in os.environ.items() if k.startswith(own)})
        longest = config.model_config.max_model_len
        told = {
            "cache_dtype": "int2",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": str(config.device_config.device_type),
            "chunk": min(longest, scheduler.max_num_batched_tokens),
            "page_size": cache.block_size,
            "radix": bool(cache.enable_prefix_caching),
            "tp": config.parallel_config.tensor_parallel_size,
            "capacity": capacity(cache),
            "longest_input": longest,
            "recipe": recipe_of(chosen),
        }
        return {"cache": told}
