"""A server on loopback with the part of SGLang's API that benchmarks use. It answers by rule: the
same question with the same seed has the same answer."""

import hashlib
import json
import math
import socket
from typing import Any

from raw_server import RawServer, Seen, json_answer

INFO = {
    "version": "0.5.21",
    "dtype": "float32",
    "device": "cpu",
    "page_size": 1,
    "chunked_prefill_size": 512,
    "disable_radix_cache": False,
    "tp_size": 1,
    "max_total_num_tokens": 9000,
    "max_req_input_len": 2042,
}


class ScriptedChat(RawServer):
    """Keeps the bodies of the chat requests in `asked`; those after `silent_after` of them wait
    until the server ends."""

    def __init__(self, cache: str) -> None:
        super().__init__(self._answer)
        self.info = {**INFO, "kv_cache_dtype": cache}
        self.asked, self.silent_after = list[dict[str, Any]](), math.inf

    def _answer(self, connection: socket.socket, seen: Seen) -> None:
        value = self.reply(json.loads(seen.body)) if seen.method == "POST" else self.info
        connection.sendall(json_answer(value))

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """A choice that depends on the question, the seed and the cache, behind some thoughts."""
        self.asked.append(body)
        if len(self.asked) > self.silent_after:
            self.ending.wait()
        told = json.dumps([body["messages"], body["seed"], self.info["kv_cache_dtype"]])
        number = hashlib.sha256(told.encode()).digest()[0]
        cut = number % 5 == 0
        letter = "ABCD"[number % 4]
        text = "<think>Let me see" if cut else f"<think>So.</think>\n\nThe answer is ({letter})."
        message = {"role": "assistant", "content": text}
        choice = {"message": message, "finish_reason": "length" if cut else "stop"}
        usage = {"prompt_tokens": 300 + number, "completion_tokens": 50 + number}
        return {"choices": [choice], "usage": usage}
