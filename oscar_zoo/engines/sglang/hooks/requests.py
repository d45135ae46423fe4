"""Hooks on every request, between SGLang's HTTP server and its scheduler. They refuse."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import setting_flags
from oscar_zoo.engines.sglang.bounds import request as bounds
from oscar_zoo.engines.sglang.compat import requests, server_arguments
from oscar_zoo.engines.sglang.fired_hooks import FIRED


def arrives(tokenizer_manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Refuse a request whose fields are not what they must be. The server goes on.

    Raises:
        RefusedField: see `bounds.check_request`.
    """
    if _checked() and requests.generates(request):
        longest = requests.context(tokenizer_manager)
        bounds.check_request(request, requests.sampling_parameters(), longest=longest)


def prompt(tokenizer_manager: Any, request: Any, input_ids: Any, *_: Any, **__: Any) -> None:
    """Refuse tokens that the model does not have, wherever they come from.

    Raises:
        RefusedField: see `bounds.check_prompt`.
    """
    if _checked():
        vocabulary = requests.vocabulary(tokenizer_manager)
        bounds.check_prompt(request, input_ids, vocabulary)


def http(_result: None, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
    """Prepare the HTTP server of this process, if there is one."""
    if _checked() and requests.http_server() is not None and "http" not in FIRED:
        FIRED.add("http")
        known, longest = requests.sampling_parameters(), requests.context(tokenizer_manager)
        requests.name_fields(bounds.field_of)
        requests.check_bodies(lambda body: bounds.wrong_body(body, known, longest=longest))


def _checked() -> bool:
    return server_arguments.published_dtype() == setting_flags.DTYPE
