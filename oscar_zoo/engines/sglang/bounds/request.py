"""One row per field that a client may set (`front.fields`), and the checks of a whole request: as
it arrives, and of each prompt once it is tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from oscar_zoo.engines.sglang.bounds import values
from oscar_zoo.engines.sglang.bounds.values import Check
from oscar_zoo.errors import UsageError

MOST_TOKENS = 2**31 - 1
MOST_STOPS = 32
MOST_STOP_TEXT = 1024
MOST_IDS = 4096
MOST_SAMPLES = 128
LEAST_PENALTY = 0.01
"""Logits are divided by it, and must stay finite."""
LEAST_TEMPERATURE = 1e-4
"""The same; 0 is greedy and divides by nothing."""
MOST_PROMPTS = 1024
"""Prompts of one request, and answers to all of them together."""
MOST_LOGPROBS = 1024
"""Tokens for which one position reports log-probabilities."""
MOST_REPORTED = 4_000_000
"""Log-probabilities of all positions of a prompt."""
CHARACTERS_PER_TOKEN = 64
"""No longer text is made into tokens: it could not fit into the context anyway."""
LEAST_TEXT = 1 << 16
ALIASES = {
    "input_ids": "prompt",
    "text": "prompt",
    "sampling_params.max_new_tokens": "max_tokens",
    "sampling_params.sampling_seed": "seed",
    "sampling_params.json_schema": "response_format",
    "top_logprobs_num": "top_logprobs",
}
"""How the OpenAI-compatible routes call a field."""


def _temperature(value: Any) -> str | None:
    wrong = values.number(0, 1e4)(value)
    if wrong is None and 1e-6 <= value < LEAST_TEMPERATURE:
        return f"must be 0 or at least {LEAST_TEMPERATURE:g}, and is {values.shown(value)}"
    return wrong


def _one_beam(value: Any) -> str | None:
    if value == 1:
        return None
    return (
        "does not work with an INT2 KV cache: beams copy slots of one request to others, whose"
        " rings stay empty. Instead: n, which samples independently"
    )


def _token_key(value: Any) -> str | None:
    """The key of a bias, a token id as text; `check_prompt` sees whether the model has it."""
    good = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10
    return None if good else "is not the id of a token"


_tokens = values.whole(0, MOST_TOKENS)
_ids = values.sequence(_tokens, MOST_IDS)
_name = values.text(values.MOST_NAME)

PARAMETERS: dict[str, Check] = {
    "max_new_tokens": _tokens,
    "min_new_tokens": _tokens,
    "n": values.whole(1, MOST_SAMPLES),
    "beam_width": _one_beam,
    "stop": values.one_or_more(values.text(MOST_STOP_TEXT), MOST_STOPS),
    "stop_token_ids": _ids,
    "stop_regex": values.one_or_more(values.stop_pattern, MOST_STOPS),
    "temperature": _temperature,
    "top_p": values.number(0, 1, above=True),
    "top_k": values.whole(1, MOST_TOKENS, -1),
    "min_p": values.number(0, 1),
    "frequency_penalty": values.number(-2, 2),
    "presence_penalty": values.number(-2, 2),
    "repetition_penalty": values.number(LEAST_PENALTY, 2),
    "json_schema": values.schema,
    "regex": values.grammar,
    "ebnf": values.grammar,
    "structural_tag": values.schema,
    "ignore_eos": values.flag,
    "skip_special_tokens": values.flag,
    "spaces_between_special_tokens": values.flag,
    "no_stop_trim": values.flag,
    "stream_interval": values.whole(1, 1 << 20),
    "logit_bias": values.mapping(_token_key, values.number(-1000, 1000), MOST_IDS),
    "sampling_seed": values.whole(-values.INT64 - 1, values.INT64),
}
"""Sampling parameters. A value of `None` means that one was left out, and is not checked."""


ROWS: dict[str, Check] = {
    "rid": _name,
    "text": values.text(1 << 30),
    "input_ids": lambda value: None,  # `check_prompt` sees them all
    "sampling_params": lambda value: None,  # `PARAMETERS` has its rows
    "return_logprob": values.flag,
    "logprob_start_len": values.whole(0, MOST_TOKENS, -1),
    "top_logprobs_num": values.whole(0, MOST_LOGPROBS),
    "token_ids_logprob": _ids,
    "return_text_in_logprobs": values.flag,
    "stream": values.flag,
    "return_hidden_states": values.word(True, False, "last"),
    "lora_path": _name,
    "extra_key": _name,
    "cache_salt": _name,
}
"""Fields of a request. A value of `None` is not checked here, either."""
OF_ALL_PROMPTS = ("input_ids", "sampling_params", "return_text_in_logprobs", "stream")
"""Fields of one value. Of the others a request with several prompts may have a list of values."""


class RefusedField(UsageError):
    """A request that asks for something that a server must not try."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = ALIASES.get(field, field.removeprefix("sampling_params."))
        called = f" ({self.field})" if field in ALIASES else ""
        super().__init__(f"{field}{called} {reason}.")


def check_request(request: Any, known: Collection[str], *, longest: int) -> None:
    """Check a request as it arrives, before SGLang divides it into prompts."""
    prompts = _prompts(request)
    samples = _check_sampling(request.sampling_params, prompts, known)
    answers = (prompts or 1) * samples
    if answers > MOST_PROMPTS:
        raise RefusedField(
            "sampling_params.n",
            f"asks for {answers} answers, and at most {MOST_PROMPTS} are allowed",
        )
    several = prompts if prompts is not None else (1 if samples > 1 else None)
    for name in ROWS:
        value = getattr(request, name, None)
        _refuse(name, None if value is None else _wrong(name, value, several))
    texts = [request.text] if isinstance(request.text, str) else request.text or []
    most = max(LEAST_TEXT, CHARACTERS_PER_TOKEN * longest)
    if any(len(text) > most for text in texts):
        raise RefusedField("text", f"has more than {most} characters, too many for this server")


def check_prompt(request: Any, ids: Sequence[int] | None, vocabulary: int) -> None:
    field = "input_ids" if request.input_ids is not None else "text"
    _refuse(field, None if ids is None else values.token_ids(ids, vocabulary))
    session = getattr(request, "session_params", None)
    if not ids and not session and not request.contains_mm_input():
        raise RefusedField(field, "holds no tokens")
    given = request.sampling_params or {}
    stops, bias = given.get("stop_token_ids") or (), given.get("logit_bias") or {}
    _refuse("sampling_params.stop_token_ids", values.token_ids(stops, vocabulary))
    _refuse("sampling_params.logit_bias", values.token_ids([*map(int, bias)], vocabulary))
    if getattr(request, "return_logprob", False):
        _check_logprobs(request, len(ids or ()), vocabulary)


def wrong_body(body: Any, known: Collection[str], *, longest: int) -> str | None:
    """What `check_request` says about the JSON of a request; `None` when nothing is wrong."""
    if not isinstance(body, dict):
        return "the body must be an object."
    request = SimpleNamespace(**(dict.fromkeys((*ROWS, "input_ids", "text")) | body))
    try:
        check_request(request, known, longest=longest)
    except RefusedField as refused:
        return refused.message
    return None


def wrong_tokens(tokens: Any, vocabulary: int) -> str | None:
    """What is wrong with tokens to make text of: one list, or a list of lists."""
    lists = tokens if tokens and isinstance(tokens[0], list) else [tokens]
    for one in lists:
        wrong = values.token_ids(one, vocabulary) if isinstance(one, list) else "is no list"
        if wrong is not None:
            return f"tokens {wrong}."
    return None


def field_of(message: str) -> str | None:
    """The field that an error message begins with, as OpenAI calls it; `None` for other errors."""
    word = message.partition(" ")[0]
    if word in ALIASES:
        return ALIASES[word]
    name = word.removeprefix("sampling_params.")
    return name if name in ROWS or name in PARAMETERS or word != name else None


def _refuse(field: str, wrong: str | None) -> None:
    if wrong is not None:
        raise RefusedField(field, wrong)


def _prompts(request: Any) -> int | None:
    if request.text is not None:
        field, given, single = "text", request.text, isinstance(request.text, str)
    elif request.input_ids is not None:
        field, given = "input_ids", request.input_ids
        single = not given or not isinstance(given[0], list)
    else:
        raise RefusedField("input_ids", "or text is needed")
    if request.text is not None and request.input_ids is not None:
        raise RefusedField("input_ids", "and text exclude each other")
    if single:
        return None
    if not given:
        raise RefusedField(field, "holds no prompt")
    if not all(isinstance(one, str if field == "text" else list) for one in given):
        raise RefusedField(field, "must be one prompt, or a list of prompts")
    if len(given) > MOST_PROMPTS:
        raise RefusedField(
            field, f"has {len(given)} prompts, and at most {MOST_PROMPTS} are allowed"
        )
    return len(given)


def _check_sampling(given: Any, prompts: int | None, known: Collection[str]) -> int:
    """Check the parameters of all prompts; returns the answers to each."""
    if given is None:
        return 1
    several = given if isinstance(given, list) and prompts is not None else [given]
    if len(several) != (prompts or 1) and several is given:
        raise RefusedField("sampling_params", f"has {len(several)} entries for {prompts} prompts")
    for one in several:
        _check_parameters(one, known)
    samples = {int(one.get("n") or 1) for one in several}
    if len(samples) > 1:
        raise RefusedField("sampling_params.n", "must be the same for all prompts of a request")
    return samples.pop()


def _check_parameters(given: Any, known: Collection[str]) -> None:
    if not isinstance(given, dict):
        raise RefusedField("sampling_params", f"must be an object, and is {values.shown(given)}")
    for name, value in given.items():
        field, wrong = f"sampling_params.{str(name)[: values.SHOWN]}", None
        if name not in known or (value is not None and name not in PARAMETERS):
            wrong = "is no sampling parameter of this server"
        elif value is not None:
            wrong = PARAMETERS[name](value)
        _refuse(field, wrong)
    least, most = given.get("min_new_tokens") or 0, given.get("max_new_tokens")
    if most is not None and least > most:
        _refuse("sampling_params.min_new_tokens", f"is {least}, and max_new_tokens is {most}")


def _wrong(name: str, value: Any, prompts: int | None) -> str | None:
    check = ROWS[name]
    if name in OF_ALL_PROMPTS or prompts is None or not isinstance(value, list):
        return check(value)
    if check is _ids and not any(isinstance(one, list) for one in value):
        return check(value)  # one list of tokens for all prompts
    if len(value) != prompts:
        return f"has {len(value)} entries for {prompts} prompts"
    found = (check(one) for one in value if one is not None)
    return next((f"has an entry that {wrong}" for wrong in found if wrong is not None), None)


def _check_logprobs(request: Any, length: int, vocabulary: int) -> None:
    start = request.logprob_start_len if request.logprob_start_len is not None else -1
    top, listed = request.top_logprobs_num or 0, request.token_ids_logprob or ()
    late = f"is {start}, and the prompt has {length} tokens" if start > length else None
    many = f"is {top}, and this model has {vocabulary} tokens" if top > vocabulary else None
    _refuse("logprob_start_len", late)
    _refuse("top_logprobs_num", many)
    _refuse("token_ids_logprob", values.token_ids(listed, vocabulary))
    positions = 1 if start == -1 else length - start + 1
    reported = positions * (top + len(listed))
    if reported > MOST_REPORTED:
        raise RefusedField(
            "logprob_start_len",
            f"asks for {reported} log-probabilities of the prompt, and at most {MOST_REPORTED} are"
            " allowed",
        )
