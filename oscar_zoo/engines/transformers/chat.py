"""Answers of a model in this process, in the events of a server (`oscar_zoo.serving.chat`). An
`OscarCache` goes on from turn to turn, so that only new tokens are computed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os.path import commonprefix
from threading import Event
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList, TextIteratorStreamer

from oscar_zoo.engines.transformers.cache import OscarCache
from oscar_zoo.engines.transformers.layer import OscarLayer
from oscar_zoo.errors import InvalidModel, UsageError
from oscar_zoo.models.chat_template import ChatTemplate
from oscar_zoo.models.loading import LoadedModel, load_tokenizer
from oscar_zoo.models.memory import memory_errors
from oscar_zoo.models.model_source import silent_transformers, source_options


def settings_of(source: str) -> GenerationConfig | None:
    """How a model says that it generates. Refuses one without a chat template."""
    if not getattr(load_tokenizer(source), "chat_template", None):
        hint = "take one that was tuned for chats, such as an -Instruct model"
        raise InvalidModel(f"{source} is a base model: it has no chat template.", hint=hint)
    where, limits = source_options(source, None)
    try:
        return GenerationConfig.from_pretrained(where, **limits)
    except OSError:
        return None


class Answering:
    """Called with the turns of a conversation, gives the events of the answer to the last one."""

    def __init__(self, model: LoadedModel, cache: OscarCache, settings: Any, most: int) -> None:
        """`cache` is empty; `most` is the maximum number of tokens of an answer."""
        self._model, self._empty, self._most = model, cache, most
        own, tok = ChatTemplate.of_tokenizer(model.tokenizer), model.tokenizer
        self._render: Any = own.render if own else partial(tok.apply_chat_template, tokenize=False)
        self._settings = settings or copy.deepcopy(model.model.generation_config)
        known = self._settings.eos_token_id
        ends = {*(known if isinstance(known, list) else [known]), tok.eos_token_id}
        self._settings.eos_token_id = self._ends = sorted(ends - {None})
        self._settings.pad_token_id = next(iter(self._ends), 0)
        self._cache, self._cached = cache, list[int]()

    def __call__(self, turns: Sequence[Mapping[str, str]]) -> Iterator[bytes]:
        model, tokenizer = self._model, self._model.tokenizer
        try:
            text = self._render(turns, add_generation_prompt=True)
        except ValueError as error:  # of a template, which is a program
            cause = str(error).partition("\n")[0][:200]
            raise UsageError(f"the chat template refuses the conversation: {cause}") from None
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        limit = (model.block.rope and model.block.rope.max_position) or len(prompt) + self._most
        most = min(self._most, limit - len(prompt))
        if most < 1:
            message = f"{len(prompt):,} tokens are asked; {model.block.id} takes {limit:,}."
            raise UsageError(message, hint="shorten the question, or begin anew with /new")
        self._crop_to(prompt)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop = Event()

        def generate() -> Any:
            try:
                with memory_errors(model.block.id, model.device), silent_transformers():
                    return model.model.generate(
                        torch.tensor([prompt], device=model.device), past_key_values=self._cache,
                        generation_config=self._settings, max_new_tokens=most, streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([lambda *_, **__: stop.is_set()]),
                    )[0].tolist()  # fmt: skip
            finally:
                streamer.end()

        self._cached = []  # so that another Ctrl-C, which waits for no token, leaves no wrong cache
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(generate)
            try:
                for part in streamer:
                    yield _event({"content": part})
            finally:
                stop.set()
                if not work.exception():
                    self._cached = work.result()[:-1]  # nothing has read the last token
        found = work.result()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(found) - len(prompt)}
        cut = len(found) == len(prompt) + most and found[-1] not in self._ends
        yield _event({}, "length" if cut else "stop", usage)

    def _crop_to(self, prompt: list[int]) -> None:
        """Leave a beginning of `prompt` in the cache: a template may write earlier turns anew."""
        common = len(commonprefix([self._cached, prompt[:-1]]))  # noqa: RUF071 (token by token)
        gone = len(self._cached) - common
        if common == 0 or (gone and {*map(type, self._cache.layers)} != {OscarLayer}):
            self._cache = copy.deepcopy(self._empty)  # states and sliding windows cannot go back
        elif gone:
            self._cache.crop(-gone)  # newer releases take no length


def _event(delta: dict[str, str], reason: str | None = None, usage: Any = None) -> bytes:
    choices = [{"delta": delta, "finish_reason": reason}]
    return json.dumps({"choices": choices, "usage": usage}).encode()
