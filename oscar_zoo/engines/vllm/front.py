"""The front of a server, which also stands in front of vLLM: `--middleware` puts it there."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from oscar_zoo.engines import setting_flags
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
        routes = Routes.of(access.VLLM)
        self._front = Front(app, chosen, routes, facts, also=fields.OF_VLLM)
        Connections().bound_all()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)
