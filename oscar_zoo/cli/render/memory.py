"""The estimate of a model's memory, as people see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oscar_zoo.cli.render import terminal


def print_memory(name: str | None, memory: Mapping[str, Any]) -> None:
    """The lines of `info`; `name` is what `fit-gpu` calls the model, where it knows it."""
    weights, int2, bf16 = (
        memory[key] for key in ("weights_bytes", "int2_token_bytes", "bf16_token_bytes")
    )
    size = (
        "weights not known to the zoo"
        if weights is None
        else f"weights {terminal.gigabytes(weights)} ({memory['weights_source']})"
    )
    request = terminal.megabytes(memory["window_bytes_per_request"])
    states = " and its states" if memory["state_bytes_per_request"] else ""
    terminal.fact(
        "memory",
        f"estimate: {size}; cache per token {int2 / 1e3:.1f} kB INT2, {bf16 / 1e3:.1f} kB BF16",
    )
    terminal.fact("", f"and {request} per running request for its BF16 tokens{states}")
    if weights is None:
        terminal.fact(
            "",
            f"1 GB of cache holds {_count(10**9 // int2)} tokens INT2, {_count(10**9 // bf16)}"
            " BF16",
        )
        return
    for card in memory["gpus"]:
        terminal.fact("fits", f"{_cards(card)}: {_fits(name, memory, card)}")
    if not memory["gpus"]:
        terminal.fact("fits", "no GPU is visible here; to ask about one: --gpu-memory 24GiB")


def _cards(card: Mapping[str, Any]) -> str:
    many = f"{card['gpus']} x " if card["gpus"] > 1 else ""
    return f"{many}{card['name']} with {terminal.gibibytes(card['memory_bytes'])}"


def _fits(name: str | None, memory: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """What fits on the GPUs of `card`."""
    tokens, plain = card["int2_tokens"], card["bf16_tokens"]
    if tokens is None:
        missing = f"the zoo does not know {memory['other_layers_unknown']}"
        size = f"{round(card['memory_bytes'] / (1 << 30), 3):g}GiB"
        return missing + (
            f"; a range: oscar-zoo fit-gpu {name} --gpu-memory {size}" if name else ""
        )
    if tokens == 0:
        states = ", windows and states" if memory["state_bytes_per_request"] else " and windows"
        return f"no, weights{states} leave no room for a cache"
    running, others = card["int2_requests"], card["bf16_requests"]
    if running == others:
        return (
            f"about {_count(tokens)} tokens INT2, {_count(plain)} BF16, with {running} requests at"
            " a time"
        )
    return (
        f"about {_count(tokens)} tokens INT2 with {running} requests at a time, {_count(plain)}"
        f" BF16 with {others}"
    )


def _count(number: int) -> str:
    return (
        f"{number / 1e6:.2f} M"
        if number >= 10**6
        else f"{number / 1e3:.0f} k"
        if number >= 10**4
        else f"{number:,}"
    )
