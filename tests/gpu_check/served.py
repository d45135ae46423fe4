"""A server that `oscar-zoo serve --json` starts, and questions to it over HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from oscar_zoo.engines.sglang.launch.plan import free_port

if TYPE_CHECKING:
    from steps import Check

ANSWER_SECONDS = 300
STOP_SECONDS = 120
PASSKEY = "528364"
LIKELIEST = 8
"""Tokens of which a server tells the log-probability."""


@dataclass(frozen=True)
class Completion:
    """An answer: its text and length, the prompt's length, and how many prompt tokens came from the
    prefix cache."""

    text: str
    tokens: int
    prompt: int
    cached: int


class Server:
    """Runs `oscar-zoo serve` with `arguments` inside a `with` block; SIGTERM ends it, and its exit
    code must be 0."""

    def __init__(self, check: Check, *arguments: str, engine_flags: tuple[str, ...]) -> None:
        self._port = free_port()
        command = ["serve", *arguments, "--port", str(self._port), "--json"]
        flags = ["--", *engine_flags] if engine_flags else []
        self._command = [check.python, "-m", "oscar_zoo", *command, *flags]
        self._check = check
        self.ready: dict[str, Any] = {}
        self.code: int | None = None

    def __enter__(self) -> Self:
        from steps import CheckFailed

        self._errors = (self._check.work / f"serve-{self._port}.stderr").open("w+")
        self._process = subprocess.Popen(
            self._command,
            cwd=self._check.work,
            env=self._check.environment(),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        told = _first_object(self._process)
        if "url" not in told:
            self._process.wait(STOP_SECONDS)
            raise CheckFailed(
                f"`oscar-zoo serve` ended with {self._process.returncode}:"
                f" {told.get('error', told)}"
            )
        self.ready = told
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        from steps import CheckFailed

        self._process.send_signal(signal.SIGTERM)
        try:
            self.code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.code = self._process.wait()
        self._errors.close()
        if kind is None and self.code != 0:
            raise CheckFailed(f"SIGTERM ended the server with exit code {self.code}")

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://127.0.0.1:{self._port}"

    def complete(self, prompt: str, tokens: int) -> Completion:
        """A greedy completion of exactly `tokens` tokens."""
        body = {
            "model": self._model(),
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = json.loads(self._send("/v1/completions", json.dumps(body).encode()))
        usage = reply["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Completion(
            reply["choices"][0]["text"], usage["completion_tokens"], usage["prompt_tokens"], cached
        )

    def choices(self, prompt: str, tokens: int) -> list[dict[int, float]]:
        """For each token of a greedy answer the likeliest ones, the chosen one first, with their
        log-probabilities."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling}
        body |= {"return_logprob": True, "top_logprobs_num": LIKELIEST}
        found = json.loads(self._send("/generate", json.dumps(body).encode()))["meta_info"]
        pairs = zip(found["output_token_logprobs"], found["output_top_logprobs"], strict=True)
        return [
            {chosen[1]: chosen[0], **{token: logprob for logprob, token, *_ in best}}
            for chosen, best in pairs
        ]

    def get(self, path: str) -> str:
        """Body of `GET path`."""
        return self._send(path, None)

    def _model(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def _send(self, path: str, body: bytes | None) -> str:
        request = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return str(response.read().decode())


def passkey_prompt(root: Path) -> tuple[str, str]:
    """A prompt and the code it asks for, which stands so far back that it is read from INT2."""
    text = (root / "examples/text/validation.txt").read_text("utf-8").split("<|endoftext|>")
    filler = " ".join(text[1].split())
    question = "\nQuestion: What is the access code of Bemika?\nAnswer: "
    return (
        f"{filler[:900]}\nThe access code of Bemika is {PASSKEY}.\n{filler[900:3400]}{question}",
        PASSKEY,
    )


def _first_object(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("}"):
            break
    return dict(json.loads(text or "{}"))
