"""Hooks on every request, between SGLang's HTTP server and its scheduler. They refuse. And
a request of the server itself, which notices that stored tokens are no longer what they were."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from oscar_zoo.engines import setting_flags
from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.bounds import request as bounds
from oscar_zoo.engines.sglang.compat import releases, requests, server_arguments
from oscar_zoo.engines.sglang.front import access
from oscar_zoo.engines.sglang.front.access import open_routes
from oscar_zoo.engines.sglang.front.messages import Connections
from oscar_zoo.engines.sglang.front.middleware import Front
from oscar_zoo.engines.sglang.worker import FIRED
from oscar_zoo.errors import UsageError

logger = logging.getLogger(__name__)

RESPONSES = "/v1/responses/"
CANARY = "oscar_zoo_canary_"
CANARY_METRICS = {
    "divergence": (
        "Mean change of the log-probability of a token of a fixed text since the start, in nats."
    ),
    "band": "The largest `divergence` that is ordinary, in nats.",
    "time_seconds": "When that text was scored last, in seconds since 1970.",
}
MARGIN = 0.2
"""Nats by which the divergence may exceed that of the first runs. It is there for other batches and
other chunks of a prefill, which change 16-bit sums and what is read as INT2."""
FIRST_RUNS, SCORED, STORED = 3, 64, 512
"""Runs that record the band; scored tokens; tokens in front of them that are read as INT2."""
PATIENCE = 60.0


class Canary:
    """Scores a fixed text every few minutes, over a prefix hit: prefill without a hit computes the
    text anew and reads no stored token. Nothing that fails here reaches another request."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager, chosen = tokenizer_manager, worker.served()[0]
        self._seconds, self._sink = 60 * chosen.canary_minutes, chosen.sink
        length = chosen.sink + STORED + max(chosen.refilled, SCORED)
        length = min(length, requests.context(tokenizer_manager) - 8)
        text = resources.files("oscar_zoo.texts").joinpath("validation.txt").read_text("utf-8")
        self._ids = tokenizer_manager.tokenizer.encode(text[: 20 * length])[:length]
        texts = {CANARY + name: text for name, text in CANARY_METRICS.items()}
        self._gauges = requests.gauges(tokenizer_manager, texts)
        self._key = uuid.uuid4().hex  # files of an earlier server hold the same text
        self._task: asyncio.Task[None] | None = None
        self.band = Band()

    def told(self) -> dict[str, Any]:
        return {"canary": self.band.told()} if self.band.runs else {}

    def start(self) -> None:
        """Begin with the first request, which SGLang sends itself: only then a loop runs."""
        self._task = self._task or asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._seconds if self.band.runs >= FIRST_RUNS else 1)
            try:
                if not requests.crowded(self._manager):
                    await self._run()
            except Exception as error:
                logger.warning("INT2 KV cache: the canary was not scored (%r)", error)
                await asyncio.sleep(self._seconds)

    async def _run(self) -> None:
        start = len(self._ids) - SCORED
        for _ in range(2):  # the first may have to store the text
            asked = self._ids, start, self._key, PATIENCE
            cached, values = await requests.score(self._manager, *asked)
            if cached > self._sink:
                if said := self.band.see(values):
                    numbers = (said, self.band.divergence, self.band.band)
                    logger.warning("INT2 KV cache: the canary %s (%.3f of %.3f nats)", *numbers)
                for name, gauge in self._gauges.items():
                    gauge.set(self.band.told()[name.removeprefix(CANARY)])
                return


class Band:
    """How far log-probabilities are from the first ones, and how far is ordinary, in nats."""

    def __init__(self) -> None:
        self._first: Sequence[float] = ()
        self.runs, self.divergence, self.band, self.time = 0, 0.0, MARGIN, 0.0

    @property
    def outside(self) -> bool:
        return not self.divergence <= self.band  # so is what is no number

    def told(self) -> dict[str, Any]:
        numbers = dict(zip(CANARY_METRICS, (self.divergence, self.band, self.time), strict=True))
        return {"outside": self.outside, **numbers}

    def see(self, values: Sequence[float]) -> str | None:
        """What to log, where the divergence leaves the band or returns."""
        before, self.runs, self._first = self.outside, self.runs + 1, self._first or values
        changes = (abs(now - then) for now, then in zip(values, self._first, strict=True))
        self.divergence, self.time = fmean(changes), time.time()
        if self.runs <= FIRST_RUNS:
            # More is no noise: a cache that is broken from the start must not widen its own band.
            self.band = max(self.band, MARGIN + min(self.divergence, MARGIN))
        if self.outside == before:
            return None
        return "left its band; see docs/troubleshooting.md" if self.outside else "is back"


def arrives(tokenizer_manager: Any, request: Any, *_: Any, **__: Any) -> None:
    if _checked() and requests.generates(request):
        longest = requests.context(tokenizer_manager)
        bounds.check_request(request, requests.sampling_parameters(), longest=longest)
        canary: Canary | None = getattr(tokenizer_manager, "oscar_canary", None)
        if canary is not None:  # `http` put it there
            canary.start()


def divided(original: Any, request: Any, *given: Any, **named: Any) -> Any:
    """Refuse a request that SGLang cannot divide into prompts, in place of an internal error."""
    try:
        return original(request, *given, **named)
    except (AttributeError, LookupError, TypeError) as error:
        if not _checked():
            raise
        raise _unfit(error) from error


def _unfit(error: Exception) -> UsageError:
    said = f"{type(error).__name__}: {str(error)[:200]}"
    return UsageError(f"the fields of the request do not fit together ({said}).")


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
        canary = None
        if worker.served()[0].canary_minutes and requests.reuses_text(tokenizer_manager):
            canary = tokenizer_manager.oscar_canary = Canary(tokenizer_manager)
        _put_in_front(canary, metrics=bool(tokenizer_manager.enable_metrics))
        vocabulary = requests.vocabulary(tokenizer_manager)
        requests.check_detokenized(lambda tokens: bounds.wrong_tokens(tokens, vocabulary))
        requests.check_converted(_unfit)
        requests.check_bodies(lambda body: bounds.wrong_body(body, known, longest=longest))


def _put_in_front(canary: Canary | None, *, metrics: bool) -> None:
    wanted = os.environ.get(setting_flags.OPTIONS["front"].variable, access.OFF)
    if wanted == access.OFF:
        return
    if wanted == access.ON:
        host, key, admin = requests.http_arguments()
        chosen = access.FrontSettings(host, key=key, engine_key=key, administration_key=admin)
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
    more: Any = {"off": partial(_off, metrics=metrics)}
    more |= {} if canary is None else {"live": canary.told}
    requests.put_in_front(lambda app: Front(app, chosen, routes, facts, freezing, **more))
    Connections().bound_all()
    requests.while_it_freezes(freezing)


def _off(path: str, *, metrics: bool) -> str | None:
    """Why this server does not answer `path`, and what to do; `None` where it does."""
    if path.rstrip("/") == "/metrics" and not metrics:
        return "This server exports no metrics. They have a flag: -- --enable-metrics."
    if not f"{path}/".startswith(RESPONSES) or requests.has_responses():
        return None
    return (
        "The Responses API is off here, because SGLang could not set it up. It needs openai-harmony"
        " (pip install openai-harmony); the log of the server says what else. Or ask"
        " /v1/chat/completions."
    )


def _checked() -> bool:
    return server_arguments.published_dtype() == setting_flags.DTYPE
