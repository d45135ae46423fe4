"""Does a model fit a GPU, and how many tokens of it: an estimate from shapes alone, without torch.

Only layers with full attention are counted. What an engine needs besides weights and cache differs
between engines and versions; `USABLE` leaves room for it. A started server says what it really got.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oscar_kernels.layout import row_bytes
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang.concurrency import Layout, usual_requests
from oscar_zoo.errors import UsageError
from oscar_zoo.models import nvidia_smi
from oscar_zoo.registry.recipe import ModelRecipe

USABLE = 0.85
"""Share of a GPU's memory for weights and cache, about what SGLang takes by itself."""
BF16_BYTES = 2
_UNITS = {"": 10**9, "gb": 10**9, "gib": 1 << 30, "mb": 10**6, "mib": 1 << 20}


def parse_memory(text: str) -> int:
    """Bytes of `24GB`, `24GiB` or `24` (GB).

    Raises:
        UsageError: it is none of these.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"{text!r} is no size of memory.", hint="write it like --gpu-memory 24GB")
    return round(float(match[1]) * _UNITS[match[2]])


def memory_facts(facts: Mapping[str, Any], gpu_memory: str | None = None) -> dict[str, Any] | None:
    """What a model of `describe` needs, and what fits on each kind of GPU; `None` where no shapes
    are known.

    Args:
        facts: of `describe`.
        gpu_memory: size of one GPU to answer for, instead of those that are visible.
    """
    cards = [("GPU", parse_memory(gpu_memory))] if gpu_memory else _visible()
    if facts["recipe"] is not None:
        recipe = ModelRecipe.model_validate_json(_json(facts["recipe"]))
        return estimate(
            recipe.geometry, recipe.serving, recipe.parameters, recipe.tensor_parallel, cards
        )
    for manifest in facts["artifacts"]:
        shape = Geometry.model_validate_json(
            _json({name: manifest["model"][name] for name in Geometry.model_fields})
        )
        return estimate(
            shape, ServingRecipe.model_validate_json(_json(manifest["recipe"])), None, 1, cards
        )
    return None


def estimate(
    geometry: Geometry,
    serving: ServingRecipe,
    parameters: int | None,
    tensor_parallel: int,
    cards: Sequence[tuple[str, int]],
) -> dict[str, Any] | None:
    """Bytes of weights and of a token, and tokens that fit.

    Args:
        geometry: shape of the cache.
        serving: group size, type of scales and windows.
        parameters: of the model, or `None` where nobody knows.
        tensor_parallel: GPUs that share the model.
        cards: name and bytes of each kind of GPU.

    Returns:
        Plain JSON values, or `None` where the INT2 cache does not take such heads. `tokens` are
        `None` where the size of the weights is not known, and 0 where nothing is left for a cache.
    """
    dims, scale = (geometry.head_dim, geometry.v_head_dim), serving.scale_dtype
    try:
        rows = sum(row_bytes(QuantSpec(dim, serving.group_size, scale_dtype=scale)) for dim in dims)
    except ValueError:
        return None
    layers, heads = len(geometry.attention_layers), geometry.num_kv_heads
    whole, spread = Layout(), Layout(tp=tensor_parallel)

    def token(layout: Layout) -> int:
        return layout.token_bytes(
            layers=layers, num_kv_heads=heads, dims=sum(dims), itemsize=BF16_BYTES
        )

    windows = serving.windows.recent + 2 * serving.windows.sink  # as `usual_requests` counts
    weights = None if parameters is None else BF16_BYTES * parameters
    kinds = []
    for name, memory in cards:
        requests = usual_requests(memory, token(spread), serving.windows, spread)
        fits: dict[str, int | None] = {"int2_tokens": None, "bf16_tokens": None}
        if weights is not None:
            left = int(USABLE * memory) - weights // tensor_parallel
            bf16 = token(spread)
            int2 = bf16 * rows // (BF16_BYTES * sum(dims))
            fits = {
                "int2_tokens": max(0, (left - requests * windows * bf16) // int2),
                "bf16_tokens": max(0, left // bf16),
            }
        kinds.append(
            {"name": name, "memory_bytes": memory, "gpus": tensor_parallel, "requests": requests}
            | fits
        )
    return {
        "estimate": True,
        "weights_bytes": weights,
        "int2_token_bytes": layers * heads * rows,
        "bf16_token_bytes": token(whole),
        "window_bytes_per_request": windows * token(whole),
        "gpus": kinds,
    }


def print_memory(memory: Mapping[str, Any]) -> None:
    """The lines of `info`."""
    weights = memory["weights_bytes"]
    size = (
        "weights not known to the zoo"
        if weights is None
        else f"weights {terminal.gigabytes(weights)} in BF16"
    )
    int2, bf16 = memory["int2_token_bytes"], memory["bf16_token_bytes"]
    window = terminal.megabytes(memory["window_bytes_per_request"])
    _line(
        "memory",
        f"estimate: {size}; cache per token {int2 / 1e3:.1f} kB INT2, {bf16 / 1e3:.1f} kB BF16",
    )
    _line("", f"and {window} per running request for its BF16 tokens")
    if weights is None:
        _line(
            "",
            f"1 GB of cache holds {_count(10**9 // int2)} tokens INT2, {_count(10**9 // bf16)}"
            " BF16",
        )
    for card in memory["gpus"] if weights is not None else ():
        name = f"{card['gpus']} x " if card["gpus"] > 1 else ""
        name += f"{card['name']} with {card['memory_bytes'] / 1e9:.0f} GB"
        if card["int2_tokens"] == 0:
            _line("fits", f"{name}: no, weights and windows leave no room for a cache")
            continue
        counts = f"{_count(card['int2_tokens'])} tokens INT2, {_count(card['bf16_tokens'])} BF16"
        _line("fits", f"{name}: about {counts}, with {card['requests']} requests at a time")
    if weights is not None and not memory["gpus"]:
        _line("fits", "no GPU is visible here; to ask about one: --gpu-memory 24GB")


def _visible() -> list[tuple[str, int]]:
    """Every kind of GPU that programs see here."""
    return list(
        dict.fromkeys((card.name, card.memory) for card in nvidia_smi.visible(nvidia_smi.gpus()))
    )


def _json(value: object) -> str:
    return json.dumps(value)


def _count(number: int) -> str:
    return (
        f"{number / 1e6:.2f} M"
        if number >= 10**6
        else f"{number / 1e3:.0f} k"
        if number >= 10**4
        else f"{number:,}"
    )


def _line(label: str, text: str) -> None:
    terminal.out().print(f"  {label:<12} {terminal.clean(text)}")
