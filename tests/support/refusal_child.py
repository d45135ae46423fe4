"""What the installed SGLang's own parser, model configurations and attention layers look like to
our refusals.

Cases are `flags` (row -> command line), `models` (row -> folder with a config.json) and `layers`
(row -> attributes of an attention layer).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def collect(cases: dict[str, Any], out: str) -> None:
    """What is said to each; `null` where the parser of this version does not know the flag. JSON in
    the file `out`.

    In a fork of `sglang_forks`, without the plugin's hooks.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
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

    assigned = {
        name: attributes.pop(name) for name in ("xai_temperature_len",) if name in attributes
    }
    if "attn_type" in attributes:
        attributes["attn_type"] = AttentionType(attributes["attn_type"])
    built = RadixAttention(
        num_heads=2, head_dim=64, scaling=1.0, num_kv_heads=1, layer_id=0, **attributes
    )
    for name, value in assigned.items():
        getattr(built, name)
        setattr(built, name, value)
    return complaint(lambda: refusals.check_layers([built]))


def complaint(check: Callable[[], None]) -> str:
    from oscar_zoo.errors import OscarZooError

    try:
        check()
    except OscarZooError as error:
        return error.message
    return ""
