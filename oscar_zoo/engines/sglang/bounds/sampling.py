"""One row per sampling parameter that a client may set."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from oscar_zoo.engines.sglang.bounds import patterns, values
from oscar_zoo.engines.sglang.bounds.values import Check

MOST_TOKENS = 2**31 - 1
MOST_STOPS = 32
MOST_STOP_TEXT = 1024
"""Characters of one stop string."""
MOST_IDS = 4096
MOST_SAMPLES = 128
LEAST_PENALTY = 0.01
"""Logits are divided by it, and must stay finite."""
LEAST_TEMPERATURE = 1e-4
"""The same; 0 is greedy and divides by nothing."""


def _temperature(value: Any) -> str | None:
    wrong = values.number(0, 1e4)(value)
    if wrong is None and 1e-6 <= value < LEAST_TEMPERATURE:
        return f"must be 0 or at least {LEAST_TEMPERATURE:g}, and is {values.shown(value)}"
    return wrong


def _token_key(value: Any) -> str | None:
    """The key of a bias, a token id as text; `token_keys` checks that the model has it."""
    good = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10
    return None if good else "is not the id of a token"


def token_keys(bias: dict[str, Any], vocabulary: int) -> str | None:
    """Whether every key of a bias is a token of the model."""
    return values.token_ids([int(key) for key in bias], vocabulary)


_stop_text = values.text(MOST_STOP_TEXT)
_id = values.whole(0, MOST_TOKENS)

ROWS: dict[str, Check] = {
    "max_new_tokens": values.whole(0, MOST_TOKENS),
    "min_new_tokens": values.whole(0, MOST_TOKENS),
    "n": values.whole(1, MOST_SAMPLES),
    "beam_width": values.whole(1, MOST_SAMPLES),
    "stop": values.one_or_more(_stop_text, MOST_STOPS),
    "stop_token_ids": values.sequence(_id, MOST_IDS),
    "stop_regex": values.one_or_more(patterns.stop_pattern, MOST_STOPS),
    "temperature": _temperature,
    "top_p": values.number(0, 1, above=True),
    "top_k": values.whole(1, MOST_TOKENS, -1),
    "min_p": values.number(0, 1),
    "frequency_penalty": values.number(-2, 2),
    "presence_penalty": values.number(-2, 2),
    "repetition_penalty": values.number(LEAST_PENALTY, 2),
    "json_schema": patterns.schema,
    "regex": patterns.grammar,
    "ebnf": patterns.grammar,
    "structural_tag": patterns.schema,
    "ignore_eos": values.flag,
    "skip_special_tokens": values.flag,
    "spaces_between_special_tokens": values.flag,
    "no_stop_trim": values.flag,
    "stream_interval": values.whole(1, 1 << 20),
    "logit_bias": values.mapping(_token_key, values.number(-1000, 1000), MOST_IDS),
    "sampling_seed": values.whole(-values.INT64 - 1, values.INT64),
}
"""A value of `None` means that the parameter was left out, and is not checked."""


def check(given: Any, known: Collection[str]) -> tuple[str, str] | None:
    """What is wrong with the sampling parameters of one request: the field, and the reason."""
    if not isinstance(given, dict):
        return "sampling_params", f"must be an object, and is {values.shown(given)}"
    for name, value in given.items():
        if name not in known or (value is not None and name not in ROWS):
            return _inside(name), "is no sampling parameter of this server"
        wrong = None if value is None else ROWS[name](value)
        if wrong is not None:
            return _inside(name), wrong
    least, most = given.get("min_new_tokens") or 0, given.get("max_new_tokens")
    if most is not None and least > most:
        return _inside("min_new_tokens"), f"is {least}, and max_new_tokens is {most}"
    return None


def check_tokens(given: dict[str, Any], vocabulary: int) -> tuple[str, str] | None:
    """The same for what depends on the model: the tokens that parameters name."""
    ids = given.get("stop_token_ids")
    wrong = values.token_ids(ids, vocabulary) if ids else None
    if wrong is not None:
        return _inside("stop_token_ids"), wrong
    bias = given.get("logit_bias")
    wrong = token_keys(bias, vocabulary) if bias else None
    return None if wrong is None else (_inside("logit_bias"), wrong)


def _inside(name: Any) -> str:
    return f"sampling_params.{str(name)[: values.SHOWN]}"
