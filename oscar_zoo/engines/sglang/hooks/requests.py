"""Hooks on every request, between SGLang's HTTP server and its scheduler. They refuse."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from oscar_zoo.engines.sglang import setting_flags
from oscar_zoo.engines.sglang.bounds import request as bounds
from oscar_zoo.engines.sglang.compat import releases, requests, server_arguments
from oscar_zoo.engines.sglang.front import access
from oscar_zoo.engines.sglang.front.access import open_routes
from oscar_zoo.engines.sglang.front.messages import Connections
from oscar_zoo.engines.sglang.front.middleware import Front
from oscar_zoo.engines.sglang.worker import FIRED
from oscar_zoo.errors import UsageError

RESPONSES = "/v1/responses/"


def arrives(tokenizer_manager: Any, request: Any, *_: Any, **__: Any) -> None:
    if _checked() and requests.generates(request):
        longest = requests.context(tokenizer_manager)
        bounds.check_request(request, requests.sampling_parameters(), longest=longest)


def divided(original: Any, request: Any, *given: Any, **named: Any) -> Any:
    """Refuse a request that SGLang cannot divide into prompts, in place of an internal error."""
    try:
        return original(request, *given, **named)
    except (AttributeError, LookupError, TypeError) as error:
        if not _checked():
            raise
        raise _unfit(error) from error


def _unfit(error: Exception) -> UsageError:
    said = str(error)[:200]
    return UsageError(
        f"the fields of the request do not fit together ({type(error).__name__}: {said})."
    )


def prompt(tokenizer_manager: Any, request: Any, input_ids: Any, *_: Any, **__: Any) -> None:
    """Refuse tokens that the model does not have, wherever they come from, and media where SGLang
    has no processor of them and would leave them out without a word. The model of such a server
    reads text only, or its images need attention to later tokens, as those of Gemma 3 do."""
    if not _checked():
        return
    no_media = getattr(tokenizer_manager, "mm_processor", None) is None
    if no_media and request.contains_mm_input():
        raise UsageError(
            "a request with images, video or audio does not work with an INT2 KV cache: this model"
            " is served with text only, and would answer as if they were not there. Instead: send"
            " the text alone."
        )
    bounds.check_prompt(request, input_ids, requests.vocabulary(tokenizer_manager))


class NoLogprobs(list[float]):
    """What a request without `token_ids_logprob` gets in a batch where another one has it."""

    def tolist(self) -> list[float]:
        """As a tensor has it: SGLang 0.5.17 calls it for every request, and ends without it."""
        return list(self)


def logprobs(_result: None, _self: Any, output: Any, *_: Any, **__: Any) -> None:
    found = output.next_token_token_ids_logprobs_val
    if found and "kv_dtype" in FIRED:
        output.next_token_token_ids_logprobs_val = [
            one if hasattr(one, "tolist") else NoLogprobs(one) for one in found
        ]


def http(_result: None, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
    if _checked() and requests.http_server() is not None and "http" not in FIRED:
        FIRED.add("http")
        known, longest = requests.sampling_parameters(), requests.context(tokenizer_manager)
        requests.name_fields(bounds.field_of)
        _put_in_front()
        vocabulary = requests.vocabulary(tokenizer_manager)
        requests.check_detokenized(lambda tokens: bounds.wrong_tokens(tokens, vocabulary))
        requests.check_converted(_unfit)
        requests.check_bodies(lambda body: bounds.wrong_body(body, known, longest=longest))


def _put_in_front() -> None:
    wanted = os.environ.get(setting_flags.OPTIONS["front"].variable, access.OFF)
    if wanted == access.OFF:
        return
    if wanted == access.ON:
        host, key, administration_key = requests.http_arguments()
        chosen = access.FrontSettings(
            host, key=key, engine_key=key, administration_key=administration_key
        )
    else:
        try:
            chosen = access.FrontSettings.read(Path(wanted))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"--oscar-front {wanted} cannot be read ({type(error).__name__}).",
                hint="oscar-zoo serve writes this file; without it, say on",
            ) from None
    version = releases.sglang_version()
    facts = {"front": chosen.id or None, "sglang": version, "needs_key": chosen.key is not None}
    routes = open_routes(version, engine_api=chosen.engine_api)
    freezing = threading.Event()
    requests.put_in_front(lambda app: Front(app, chosen, routes, facts, freezing, off=_off))
    requests.bound_connections(Connections().bound)
    requests.while_it_freezes(freezing)


def _off(path: str) -> str | None:
    """Why this server does not answer `path`, and what to do; `None` where it does."""
    if not f"{path}/".startswith(RESPONSES) or requests.has_responses():
        return None
    return (
        "The Responses API is off here, because SGLang could not set it up. It needs openai-harmony"
        " (pip install openai-harmony); the log of the server says what else. Or ask"
        " /v1/chat/completions."
    )


def _checked() -> bool:
    return server_arguments.published_dtype() == setting_flags.DTYPE
