"""The command that starts stock vLLM with the plugin. Needs neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oscar_zoo.engines.setting_flags import OPTIONS
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, ServeOptions
from oscar_zoo.engines.vllm.register import DTYPE


def for_vllm(planned: LaunchPlan, options: ServeOptions, words: Sequence[str]) -> LaunchPlan:
    """The same for stock vLLM, whose command line takes no settings of ours: they are variables."""
    given = dict(word.split("=", 1) for word in planned.argv if word.startswith("--oscar-"))
    ours = {one.variable: given[one.flag] for one in OPTIONS.values() if one.flag in given}
    flags = {
        "--kv-cache-dtype": DTYPE,
        "--host": options.host,
        "--port": str(options.port),
        "--served-model-name": options.served_name,
        "--revision": options.revision,
        "--tensor-parallel-size": None
        if options.tensor_parallel == 1
        else str(options.tensor_parallel),
    }
    argv = [f"{name}={value}" for name, value in flags.items() if value is not None]
    ours.pop(OPTIONS["front"].variable, None)
    return replace(planned, argv=("vllm", "serve", options.model, *argv, *words), sets=ours)
