"""The command that starts stock vLLM with the plugin. Needs neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oscar_zoo.engines.setting_flags import OPTIONS
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, ServeOptions
from oscar_zoo.engines.vllm.register import DTYPE
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models.other_layers import kept_by_others
from oscar_zoo.observer import Note, Observer

SET = "this command sets it"
NOT_BUILT = "the INT2 cache in vLLM does not have it"
OPENS = "a command that everybody on this machine may read does not open a server"
REFUSED = {
    "--kv-cache-dtype": SET,
    "--host": SET,
    "--port": SET,
    "--api-key": OPENS,
    "--trust-remote-code": OPENS,
    "--tensor-parallel-size": NOT_BUILT,
    "-tp": NOT_BUILT,
    "--pipeline-parallel-size": NOT_BUILT,
    "-pp": NOT_BUILT,
    "--speculative-config": NOT_BUILT,
    "--enable-lora": NOT_BUILT,
    "--kv-transfer-config": NOT_BUILT,
}
"""Flags of vLLM that do not go behind `--`, and why."""
REQUESTS, MOST_REQUESTS = "--max-num-seqs", 64
"""Of its own vLLM prepares for up to 1,024 requests at a time, each of which has windows here."""
ADVICE = (
    "vLLM with this plugin was tested on a CPU only. Run the command where vllm 0.33, this package"
    " and the artifact are."
)


def for_vllm(
    planned: LaunchPlan, prepared: Any, params: Any, words: Sequence[str], observer: Observer
) -> LaunchPlan:
    """The same for stock vLLM, whose command line takes no settings of ours: they are variables.
    `prepared` and `params` are those of `serving`."""
    options = ServeOptions(**prepared.options(params))
    given_flags = {word.partition("=")[0].replace("_", "-") for word in words}
    for flag in given_flags:
        if flag in REFUSED:
            raise UsageError(f"{flag} does not go behind --: {REFUSED[flag]}.")
    if options.tensor_parallel > 1:
        raise UsageError(f"{options.tensor_parallel} GPUs for one model: {NOT_BUILT}.")
    config, geometry = prepared.config, prepared.geometry
    if config and geometry and kept_by_others(config.get_text_config(), geometry):
        raise UnsupportedModel(
            f"{options.model} has layers without full attention: {NOT_BUILT}.",
            hint="serve it with SGLang: leave out --engine",
        )
    given = dict(word.split("=", 1) for word in planned.argv if word.startswith("--oscar-"))
    given.pop(OPTIONS["front"].flag)
    ours = {one.variable: given[one.flag] for one in OPTIONS.values() if one.flag in given}
    flags = {
        "--kv-cache-dtype": DTYPE,
        "--host": options.host,
        "--port": str(options.port),
        "--served-model-name": options.served_name,
        "--revision": options.revision,
        REQUESTS: None if REQUESTS in given_flags else str(MOST_REQUESTS),
    }
    argv = [f"{name}={value}" for name, value in flags.items() if value is not None]
    observer.note(Note("serve.vllm", ADVICE))
    return replace(planned, argv=("vllm", "serve", options.model, *argv, *words), sets=ours)
