"""SGLang's requests on their way to the scheduler, and how its HTTP server refuses one."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

SERVER = "sglang.srt.entrypoints.http_server"


def generates(request: Any) -> bool:
    """Whether `request` asks for text; the others ask for embeddings, which have other fields."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return isinstance(request, GenerateReqInput)


@functools.cache
def sampling_parameters() -> frozenset[str]:
    from sglang.srt.sampling.sampling_params import SamplingParams

    return frozenset(SamplingParams.__struct_fields__)


def vocabulary(tokenizer_manager: Any) -> int:
    return int(tokenizer_manager.model_config.vocab_size)


def context(tokenizer_manager: Any) -> int:
    return int(tokenizer_manager.model_config.context_len)


def reuses_text(tokenizer_manager: Any) -> bool:
    """Whether it has a tokenizer, and a prefix cache."""
    radix = not tokenizer_manager.server_args.disable_radix_cache
    return radix and tokenizer_manager.tokenizer is not None


def crowded(tokenizer_manager: Any) -> bool:
    """Whether a new request would wait for a row."""
    most = tokenizer_manager.server_args.max_running_requests
    return len(tokenizer_manager.rid_to_state) >= (most or 1)


async def score(
    tokenizer_manager: Any, ids: Sequence[int], start: int, key: str, seconds: float
) -> tuple[int, list[float]]:
    """Cached tokens of a prompt, and log-probabilities of its tokens behind `start`, in a request
    that no metric of requests counts. What it reads was stored by one with the same `key`."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        rid=uuid.uuid4().hex,
        input_ids=list(ids),
        extra_key=key,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=start,
        log_metrics=False,
    )
    try:
        async with asyncio.timeout(seconds):
            async for answer in tokenizer_manager.generate_request(request, None):
                meta = answer["meta_info"]
    finally:
        if request.rid in tokenizer_manager.rid_to_state:  # it took too long
            tokenizer_manager.abort_request(request.rid)
    return int(meta["cached_tokens"]), [float(one[0]) for one in meta["input_token_logprobs"][1:]]


def gauges(tokenizer_manager: Any, texts: dict[str, str]) -> dict[str, Any]:
    """Gauges on SGLang's `/metrics` by name; none where it exports nothing."""
    if not tokenizer_manager.enable_metrics:
        return {}
    from prometheus_client import Gauge

    labels = tokenizer_manager.metrics_collector.labels
    return {
        name: Gauge(name, text, [*labels], multiprocess_mode="mostrecent").labels(**labels)
        for name, text in texts.items()
    }


def http_server() -> Any:
    """SGLang's HTTP server in this process: its module; `None` where there is none."""
    return sys.modules.get(SERVER)


def has_responses() -> bool:
    """Whether the HTTP server of this process answers OpenAI's Responses API. SGLang leaves it out
    where it cannot be set up, and its routes answer 500 then."""
    return hasattr(http_server().app.state, "openai_serving_responses")


def name_fields(field_of: Callable[[str], str | None]) -> None:
    """Let answers of the OpenAI-compatible routes to bad requests name the field, as OpenAI's own
    do."""
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

    original = OpenAIServingBase.create_error_response

    @functools.wraps(original)
    def answer(self: Any, message: str, *given: Any, **named: Any) -> Any:
        response = original(self, message, *given, **named)
        field = field_of(message) if response.status_code == 400 else None
        if field is None:
            return response
        error = {**_bad_request(message), "param": field}
        # OpenAI's clients read the inner object, clients of SGLang the outer one.
        return ORJSONResponse({"error": error, "object": "error", **error}, status_code=400)

    OpenAIServingBase.create_error_response = answer


def _bad_request(message: str) -> dict[str, Any]:
    return {"message": message, "type": "invalid_request_error", "code": 400}


def put_in_front(make: Callable[[Any], Any]) -> None:
    app = http_server().app
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: make(build())
    app.middleware_stack = None  # built again for the next request


def while_it_freezes(freezing: threading.Event) -> None:
    """Set an event while SGLang freezes its garbage collector through its own HTTP server; 0.5.17
    does not."""
    server = http_server()
    freeze = getattr(server, "_freeze_gc_after_server_warmup", None)
    if freeze is None:
        return

    def told(*given: Any, **named: Any) -> Any:
        freezing.set()
        try:
            return freeze(*given, **named)
        finally:
            freezing.clear()

    server._freeze_gc_after_server_warmup = told


def http_arguments() -> tuple[str, str | None, str | None]:
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return str(args.host), args.api_key, args.admin_api_key


def check_bodies(wrong: Callable[[Any], str | None]) -> None:
    """Let `/generate` ask `wrong` of the JSON of a request before a schema of SGLang, which names
    no field; releases before 0.5.23 have none."""
    server = http_server()
    if hasattr(server, "generate_contract_error"):
        schema = server.generate_contract_error
        server.generate_contract_error = lambda body: wrong(body) or schema(body)


def guard_grammars(
    guarded: Callable[[type[Any], str | None], Any],
    followed: Callable[[type[Any]], type[Any]],
    forget: Callable[[Any], None],
) -> None:
    """Let `guarded` wrap the compiler of grammars and `followed` what follows one, and `forget` see
    each cache that has grown. SGLang 0.5.17 ends with the first grammar that it follows without a
    GPU."""
    try:
        from sglang.srt.constrained import base_grammar_backend, xgrammar_backend
    except ImportError:  # a server without grammars
        return
    backend = base_grammar_backend.BaseGrammarBackend
    if hasattr(backend.set_cache, "__wrapped__"):  # by an earlier model runner of this process
        return
    keep = backend.set_cache

    @functools.wraps(keep)
    def kept(self: Any, *given: Any, **named: Any) -> None:
        keep(self, *given, **named)
        forget(self.cache)

    backend.set_cache = kept
    ends = not hasattr(xgrammar_backend, "is_pin_memory_available")
    refusal = "cannot be followed by this release of SGLang without a GPU"
    needs_gpu = refusal if ends and not xgrammar_backend.torch.cuda.is_available() else None
    xgrammar_backend.GrammarCompiler = guarded(xgrammar_backend.GrammarCompiler, needs_gpu)
    xgrammar_backend.GrammarMatcher = followed(xgrammar_backend.GrammarMatcher)


def check_detokenized(wrong: Callable[[Any], str | None]) -> None:
    """Let `/detokenize` ask `wrong` of the tokens of a request; SGLang answers 500 where its
    tokenizer fails."""
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize

    original = OpenAIServingDetokenize.handle_request

    async def handle(self: Any, request: Any, *given: Any, **named: Any) -> Any:
        message = wrong(request.tokens)
        if message is not None:
            return self.create_error_response(message)
        return await original(self, request, *given, **named)

    OpenAIServingDetokenize.handle_request = handle


def check_converted(unfit: Callable[[Exception], Exception]) -> None:
    """Let chats and completions that cannot be made into a request of the engine raise what `unfit`
    makes of the error, and answer 400. SGLang renders a client's arguments into the template of a
    chat there, and answers 500 where the template takes them badly, or a route takes a value so."""
    from fastapi import HTTPException
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai import serving_chat, serving_completions
    from sglang.srt.managers.io_struct import GenerateReqInput

    def checked(original: Any) -> Any:
        @functools.wraps(original)
        def convert(*given: Any, **named: Any) -> Any:
            try:
                return original(*given, **named)
            except (HTTPException, ValueError):
                raise
            except Exception as error:
                raise unfit(error) from error

        return convert

    for kind in (serving_chat.OpenAIServingChat, serving_completions.OpenAIServingCompletion):
        kind._convert_to_internal_request = checked(kind._convert_to_internal_request)
    chat = serving_chat.OpenAIServingChat
    chat._process_messages = checked(chat._process_messages)
    count = AnthropicServing.handle_count_tokens

    async def counted(self: Any, *given: Any, **named: Any) -> Any:
        answer = await count(self, *given, **named)
        if answer.status_code != 500:
            return answer
        why = "the messages cannot be made into a prompt."
        return self._error_response(400, "invalid_request_error", why)

    def refused(_: Any, error: Exception) -> Any:
        return ORJSONResponse({"error": _bad_request(str(error)[:500])}, status_code=400)

    AnthropicServing.handle_count_tokens = counted
    http_server().app.add_exception_handler(ValueError, refused)
    # Read behind the end of a stream, also of one that was refused before it was divided.
    GenerateReqInput.is_single = True
