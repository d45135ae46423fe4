"""SGLang's flags as a user wrote them behind `--`, checked and read once.

`UserFlags` exists only for flags that `serve` allows, so what builds a command line from it checks
nothing again. Flags that SGLang does not know are refused by SGLang, which names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oscar_zoo.engines.sglang.sizing import SizeFlags
from oscar_zoo.errors import UsageError

DENIED_FLAGS = {
    "--trust-remote-code": "it runs code from the model repository",
    "--host": "use --expose with an API key",
    "--port": "use oscar-zoo serve --port",
    "--api-key": "arguments are visible to every local user; use --api-key-file",
    "--admin-api-key": "arguments are visible to every local user",
    "--model-path": "use oscar-zoo serve --model",
    "--model": "use oscar-zoo serve --model",
    "--kv-cache-dtype": "serve always runs the INT2 cache",
    "--config": "a configuration file could set any of the refused flags",
    "--enable-custom-logit-processor": "it unpickles code from requests",
    "--custom-weight-loader": "it imports code by name",
    "--custom-sigquit-handler": "it imports code by name",
    "--forward-hooks": "it imports code by name",
    "--oscar-rotation-path": "serve gives the server its own verified copy",
    "--oscar-artifact": "serve gives the server its own verified copy",
    "--oscar-name": "serve says what it verified",
    "--oscar-copy-of": "serve says what it verified",
    "--oscar-rotation-sha256": "serve sets it from the copy it wrote",
    "--oscar-front": "serve always has its front",
    "--device": "use --device in front of --",
    "--base-gpu-id": "use --device cuda:N in front of --",
    "--ssl-keyfile-password": "arguments are visible to every local user",
    "--watermark-key": "arguments are visible to every local user",
    "--watermark-key-b": "arguments are visible to every local user",
    "--sidecar": "it runs a module by name",
    "--sidecar-args": "it runs a module by name",
    "--tool-server": "it lets answers of the model run tools",
    "--trust-request-chat-template": "it runs templates from requests",
    "--modelopt-checkpoint-restore-path": "it unpickles a checkpoint",
    "--grpc-mode": "it opens a server without the API key",
    "--smg-grpc-mode": "it opens a server without the API key",
    "--grpc-port": "it opens a server without the API key",
    "--grpc-http-sidecar-port": "it opens a server without the API key",
    "--smg-http-sidecar-port": "it opens a server without the API key",
    "--gated-launch-port": "it opens a server without the API key",
    "--kv-events-config": "it publishes what is cached to the network",
    "--load-publish-endpoint": "it publishes the load to the network",
    "--dist-init-addr": "processes of several machines exchange pickles over the network",
    "--nccl-init-addr": "processes of several machines exchange pickles over the network",
    "--nnodes": "processes of several machines exchange pickles over the network",
    "--node-rank": "processes of several machines exchange pickles over the network",
    "--use-ray": "processes of several machines exchange pickles over the network",
    "--language-only": "encoders on other machines are reached without a key",
    "--modelexpress-config": "weights would come over the network, unchecked",
    "--decrypted-config-file": "the model would not be the one that was checked",
}
"""Engine flags that `serve` refuses after `--`, with the reason that the user reads. A test holds
the list against the flags of every supported release."""

DENIED_FAMILIES = {
    "--disaggregation-": "disaggregation with an INT2 cache is not supported",
    "--encoder-": "encoders on other machines are reached without a key",
    "--decoupled-spec-": "speculative decoding with an INT2 cache is not supported",
    "--hicache-storage-": "it imports code by name, and an INT2 cache has no copy on the host",
    "--unified-cache-external-linker-": (
        "it imports code by name, and an INT2 cache has no copy elsewhere"
    ),
    "--remote-instance-weight-loader-": "weights would come from another server, unchecked",
    "--weight-cache-": "weights would come from another process, unchecked",
    "--elastic-ep-": "processes of several machines exchange pickles over the network",
}
"""The same for every flag whose name begins so, those of later SGLang releases included."""

WHOLE_FLAGS = frozenset(["--ssl-keyfile"])
"""Allowed flags whose name is the beginning of a refused one: the engine prefers a whole name."""

SERVED_NAME = "--served-model-name"
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
"""The names of one flag."""
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
ATTENTION_DATA_PARALLEL = ("--attn-dp-size", "--attention-data-parallel-size")
DP_ATTENTION = "--enable-dp-attention"
UNKNOWN_WEIGHTS = (
    "--quantization",
    "--cpu-offload-gb",
    "--load-format",
    "--json-model-override-args",
)
"""Flags with which the size of the weights cannot be told from the files of a model."""


class Flag(NamedTuple):
    """One flag, with hyphens in its name whatever the user wrote: what stands after `=`, else the
    next word, or `None` at the end of the line; and the same as its value, `None` where the next
    word is a flag itself."""

    name: str
    text: str | None
    value: str | None


class UserFlags:
    """The flags of one server: `words` for SGLang, which reads them itself, and the flags `given`
    among them, in order."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        check_extra_flags(words)
        self.words = tuple(words)
        self.given = tuple(_flags(words))

    def after(self, *words: str) -> UserFlags:
        """These flags behind `words`, over which they win."""
        return UserFlags((*words, *self.words))

    def without(self, prefix: str) -> tuple[str, ...]:
        """The words less the flags whose names begin with `prefix`, and their values."""
        kept, dropped = list[str](), False
        for word in self.words:
            if word.startswith("--"):
                name = word.partition("=")[0].replace("_", "-")
                dropped = name.startswith(prefix)
            if not dropped:
                kept.append(word)
        return tuple(kept)

    def last(self, *names: str) -> Flag | None:
        """The flag with any of these names of one flag, or with the beginning of one, as SGLang's
        parser completes it; the last where there are several. (It refuses the beginning of several
        flags, and no flag of SGLang is the beginning of one that is asked for here.)"""
        found = [flag for flag in self.given if _means(flag.name, names)]
        return found[-1] if found else None

    def text(self, *names: str) -> str | None:
        """What is written for a flag that takes a value, found as by `last`."""
        flag = self.last(*names)
        return None if flag is None else flag.text

    def sizes(self) -> SizeFlags:
        """Those that decide how many GPUs and how much memory a server takes."""
        requests = self.text("--max-running-requests") or ""
        return SizeFlags(
            tensor_parallel=_tensor_parallel(self.text(*TENSOR_PARALLEL)),
            pipeline_parallel=_number(self.text(*PIPELINE_PARALLEL)),
            data_parallel=_number(self.text(*DATA_PARALLEL)),
            attention_data_parallel=_number(self.text(*ATTENTION_DATA_PARALLEL)),
            dp_attention=self.last(DP_ATTENTION) is not None,
            dtype=self.text("--dtype"),
            requests=int(requests) if requests.isdecimal() else None,
            memory_fraction=_fraction(self.text("--mem-fraction-static")),
            weights_known=all(
                self.last(*names) is None
                for names in (*((name,) for name in UNKNOWN_WEIGHTS), PIPELINE_PARALLEL)
            ),
        )


def check_extra_flags(extra: Sequence[str]) -> None:
    """Refuse engine flags that would open the server or replace what `serve` guarantees, and
    abbreviations that the engine's parser would complete to one."""
    for token in extra:
        if not token.startswith("-") or token.lstrip("-").split("=")[0].replace(".", "").isdigit():
            continue
        if any(ord(c) < 32 for c in token):
            raise UsageError("an engine flag holds a control character.")
        name = token.split("=", 1)[0].replace("_", "-")
        reason = _reason_against(name)
        if reason is not None:
            raise UsageError(
                f"{name} is not allowed after --: {reason}.", hint="try: oscar-zoo serve --help"
            )


def _reason_against(name: str) -> str | None:
    if name in WHOLE_FLAGS:
        return None
    for denied, reason in DENIED_FLAGS.items():
        if name == denied or (len(name) > 2 and denied.startswith(name)):
            return reason
    for family, reason in DENIED_FAMILIES.items():
        if name.startswith(family) or (len(name) > 2 and family.startswith(name)):
            return reason
    return None


def _means(flag: str, names: Sequence[str]) -> bool:
    return len(flag) > 2 and any(name.startswith(flag) for name in names)


def _flags(words: Sequence[str]) -> Iterator[Flag]:
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, joined = word.partition("=")
            after = words[place + 1] if place + 1 < len(words) else None
            text = joined if equals else after
            follows = not equals and text is not None and text.startswith("--")
            yield Flag(name.replace("_", "-"), text, None if follows else text)


def _tensor_parallel(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--tp {text!r} is not a number of GPUs.", hint="for example -- --tp=2")
    return None if text is None else int(text)


def _number(text: str | None) -> int:
    return max(1, int(text)) if text is not None and text.isdecimal() else 1


def _fraction(text: str | None) -> float | None:
    try:
        return None if text is None else min(1.0, float(text))
    except ValueError:
        return 1.0
