"""The estimate of a model's memory, as people see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oscar_zoo.cli.render import terminal


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
    terminal.fact(
        "memory",
        f"estimate: {size}; cache per token {int2 / 1e3:.1f} kB INT2, {bf16 / 1e3:.1f} kB BF16",
    )
    terminal.fact("", f"and {window} per running request for its BF16 tokens")
    if weights is None:
        terminal.fact(
            "",
            f"1 GB of cache holds {_count(10**9 // int2)} tokens INT2, {_count(10**9 // bf16)}"
            " BF16",
        )
    for card in memory["gpus"] if weights is not None else ():
        name = f"{card['gpus']} x " if card["gpus"] > 1 else ""
        name += f"{card['name']} with {card['memory_bytes'] / 1e9:.0f} GB"
        if card["int2_tokens"] == 0:
            terminal.fact("fits", f"{name}: no, weights and windows leave no room for a cache")
            continue
        counts = f"{_count(card['int2_tokens'])} tokens INT2, {_count(card['bf16_tokens'])} BF16"
        terminal.fact("fits", f"{name}: about {counts}, with {card['requests']} requests at a time")
    if weights is not None and not memory["gpus"]:
        terminal.fact("fits", "no GPU is visible here; to ask about one: --gpu-memory 24GB")


def _count(number: int) -> str:
    return (
        f"{number / 1e6:.2f} M"
        if number >= 10**6
        else f"{number / 1e3:.0f} k"
        if number >= 10**4
        else f"{number:,}"
    )
