"""What a client may ask: the fields of each route, and nothing else.

A field that is in no list is refused by its name, so what a release of SGLang adds for its own
processes is closed until somebody puts it here. `--engine-api` leaves these lists out. Values are
bounded by `bounds`; here only what a recursive reader or a chat template could fail at.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from oscar_zoo.engines.sglang.front.messages import Refused

MOST_DEPTH = 64
MOST_NESTED, MOST_VALUES = 500_000, 2_000_000
"""Lists and objects of a body, and these with all other values. A reader keeps everybody waiting,
and takes a hundred times the memory of empty lists."""
MOST_TEMPLATE_WORDS = 64
MOST_WORD = 4096
MOST_ID, MOST_IDS = 512, 1024
LONG = frozenset("prompt text input instructions system suffix regex ebnf json_schema".split())
_COMMON = frozenset(
    "model max_tokens n temperature top_p top_k min_p min_tokens frequency_penalty presence_penalty"
    " repetition_penalty logit_bias logprobs seed stop stop_token_ids stop_regex no_stop_trim"
    " ignore_eos skip_special_tokens stream stream_options user response_format regex ebnf"
    " lora_path rid extra_key cache_salt return_hidden_states return_cached_tokens_details"
    " return_token_ids".split()
)
_CHAT = _COMMON | frozenset(
    # OpenAI's, of which SGLang ignores some
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls"
    " reasoning_effort store metadata service_tier safety_identifier prompt_cache_key"
    " prompt_cache_retention verbosity prediction modalities audio functions function_call"
    " web_search_options"
    # SGLang's
    " continue_final_message separate_reasoning stream_reasoning chat_template_kwargs"
    " return_prompt_token_ids return_meta_info".split()
)
_COMPLETION = _COMMON | frozenset("prompt best_of echo suffix json_schema".split())
_RESPONSE = frozenset(
    "background include input instructions max_output_tokens max_tool_calls metadata model"
    " parallel_tool_calls previous_response_id prompt_cache_key prompt_cache_retention reasoning"
    " safety_identifier service_tier store stream stream_options temperature text tool_choice tools"
    " top_logprobs top_p truncation user verbosity frequency_penalty presence_penalty stop top_k"
    " min_p repetition_penalty chat_template_kwargs extra_key cache_salt".split()
)
_COUNT = frozenset("model messages system thinking tool_choice tools output_config betas".split())
_MESSAGE = _COUNT | frozenset(
    "max_tokens metadata stop_sequences stream temperature top_k top_p service_tier"
    " context_management".split()
)
_GENERATE = frozenset(
    "text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num"
    " token_ids_logprob return_text_in_logprobs stream rid lora_path return_hidden_states extra_key"
    " cache_salt".split()
)
_TOKENIZE = frozenset(
    "model prompt messages tools tool_choice reasoning_effort continue_final_message"
    " add_special_tokens add_generation_prompt".split()
)
_DETOKENIZE = frozenset("model tokens skip_special_tokens".split())

FIELDS: Mapping[str, frozenset[str]] = {
    "/generate": _GENERATE,
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _COUNT,
    "/tokenize": _TOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/detokenize": _DETOKENIZE,
    "/api/show": frozenset({"model", "name", "verbose"}),
}
"""Fields by route. Another route with a body has no list, and takes none."""

OF_VLLM = frozenset(
    "prompt_logprobs return_tokens_as_token_ids allowed_token_ids bad_words length_penalty"
    " include_stop_str_in_output add_special_tokens spaces_between_special_tokens"
    " structured_outputs include_reasoning truncate_prompt_tokens return_token_strs".split()
)
"""What vLLM takes besides, on every route."""

TYPES: Mapping[str, tuple[type, str]] = {
    "response_format": (dict, "an object"),
    "extra_key": (str, "a string"),
    "cache_salt": (str, "a string"),
    "stream_options": (dict, "an object"),
}
"""Types that some release of SGLang takes for granted, and answers 500 where they are others."""

OF_THE_CALL = frozenset(
    "conversation tools documents chat_template add_generation_prompt continue_final_message"
    " tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs"
    " return_assistant_tokens_mask messages self".split()
)
"""Arguments of the function that renders a chat, which SGLang sets itself."""


class Wrong(Refused):
    """Why a body is refused, in one sentence; `field` is what it is about, if it is about one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(400, message, "invalid_value", field)


def read(content: bytes) -> Any:
    """The JSON of a body; raises `Wrong` where it is none, or nested deeper than `MOST_DEPTH`."""
    lists = content.count(b"[") + content.count(b"{")  # as if none stood in a text
    if lists > MOST_NESTED or lists + content.count(b",") > MOST_VALUES:
        raise Wrong(f"the body has more than {MOST_NESTED:,} lists or {MOST_VALUES:,} values.")
    try:
        value = json.loads(content, parse_constant=_no_constant)
    except RecursionError:
        raise Wrong(f"the body is nested deeper than {MOST_DEPTH} levels.") from None
    except ValueError as error:
        raise Wrong(f"the body is no JSON: {str(error)[:100]}.") from None
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise Wrong(f"the body is nested deeper than {MOST_DEPTH} levels.")
        nested = (
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        )
        level = [one for many in nested for one in many if isinstance(one, dict | list)]
    return value


def check(path: str, value: Any, also: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong("the body must be an object.")
    known = FIELDS.get(path, frozenset()) | also
    for name, inner in value.items():
        if name not in known:
            raise Wrong(
                f"{name[:60]!r} is no field of {path} here. See --engine-api in docs/serving.md.",
                name[:60],
            )
        kind, called = TYPES.get(name, (object, ""))
        if inner is not None and not isinstance(inner, kind):
            raise Wrong(f"{name} must be {called}.", name)
        if isinstance(inner, str) and name not in LONG and len(inner) > MOST_WORD:
            raise Wrong(f"{name} has more than {MOST_WORD} characters.", name)
    _check_template(value.get("chat_template_kwargs"))
    return value


def _check_template(given: Any) -> None:
    name = "chat_template_kwargs"
    if given is None:
        return
    if not isinstance(given, dict):
        raise Wrong(f"{name} must be an object.", name)
    if len(given) > MOST_TEMPLATE_WORDS:
        raise Wrong(f"{name} has more than {MOST_TEMPLATE_WORDS} entries.", name)
    for key, inner in given.items():
        if key in OF_THE_CALL or not key.isidentifier():
            raise Wrong(f"{name} must not set {key[:60]!r}.", name)
        if isinstance(inner, dict | list):
            raise Wrong(f"{name} has an entry {key[:60]!r} that is no text, number or flag.", name)


def own_ids(body: dict[str, Any]) -> dict[str, str]:
    """Put ids of ours, which are no beginnings of each other, in the place of those that a client
    chose. SGLang ends all requests whose ids begin with the one that it is told to end."""
    given = body.get("rid")
    if given is None:
        return {}
    several = given if isinstance(given, list) else [given]
    good = all(isinstance(one, str) and len(one) <= MOST_ID for one in several)
    if not good or len(several) > MOST_IDS:
        raise Wrong(
            f"rid must be a string of at most {MOST_ID} characters, or a list of {MOST_IDS}.", "rid"
        )
    ours = {secrets.token_hex(16): one for one in several}
    body["rid"] = [*ours] if isinstance(given, list) else next(iter(ours))
    return ours


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
