"""Our backend beside linear attention on a Blackwell GPU, as far as SGLang asks for names."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
