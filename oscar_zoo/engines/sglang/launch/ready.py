"""What a running INT2 server says of itself. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_zoo.engines.server_client import INT2, ServerClient
from oscar_zoo.errors import ServerFailed

PLAIN_BYTES = 2
"""Bytes of one number in a BF16 cache."""


@dataclass(frozen=True)
class ReadyFacts:
    """Facts from `/server_info` and `/v1/models`.

    Attributes:
        model: id that requests name.
        version: version of SGLang.
        capacity: tokens that the cache holds, over all data-parallel workers.
        plain_capacity: tokens that a BF16 cache of the same memory would hold; `None` where the
            capacity was limited by a flag.
        bits: per cached element, scales and offsets included.
        sink, recent: tokens kept uncompressed.
        code_bits: of keys and values, as `layer_values.CodeBits` writes them.
        k_clip, v_clip: ratios in force; 0 is no clipping, and a text lists those of the layers.
        requests: concurrent requests, over all data-parallel workers.
        context: tokens of the longest request.
    """

    model: str
    version: str
    capacity: int
    plain_capacity: int | None
    bits: float
    sink: int
    recent: int
    code_bits: str
    k_clip: float | str
    v_clip: float | str
    requests: int
    context: int | None


def read_facts(client: ServerClient) -> ReadyFacts:
    """Ask a running server."""
    info, models = client.get("/server_info"), client.get("/v1/models")
    try:
        model = models["data"][0]
        states = [state[INT2] for state in info["internal_states"]]
        recipe, memories = states[0]["recipe"], [state["memory"] for state in states]
        bits = float(states[0]["bits_per_element"])
        limited = info.get("max_total_tokens") is not None
        return ReadyFacts(
            model=str(model["id"]),
            version=str(info["version"]),
            capacity=sum(int(memory["token_slots"]) for memory in memories),
            plain_capacity=None
            if limited
            else sum(_plain_tokens(memory, bits) for memory in memories),
            bits=bits,
            sink=int(recipe["sink"]),
            recent=int(recipe["recent"]),
            code_bits=str(recipe["bits"]),
            k_clip=_clip(recipe["k_clip"]),
            v_clip=_clip(recipe["v_clip"]),
            requests=sum(int(memory["request_rows"]) - 1 for memory in memories),
            context=int(model["max_model_len"]) if model.get("max_model_len") else None,
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"{client.url} does not describe its INT2 cache: {type(error).__name__} {error}.",
            hint="see its log",
        ) from None


def _clip(told: Any) -> float | str:
    return told if isinstance(told, str) else float(told)


def _plain_tokens(memory: Mapping[str, Any], bits: float) -> int:
    """Uncompressed tokens that would fit into the memory found for the cache."""
    elements = round(8 * int(memory["slot_bytes"]) / bits)
    return int(memory["found_bytes"]) // (PLAIN_BYTES * elements)
