"""SGLang's flags as a user wrote them behind `--`, checked and read once.

`UserFlags` exists only for flags that `serve` allows, so what builds a command line from it checks
nothing again. Flags that SGLang does not know are refused by SGLang, which names them. What an INT2
cache refuses is told before SGLang reads it: the rows are those of `refusals`, which checks what
SGLang made of all flags, so a flag that SGLang itself sets is found at start-up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from oscar_zoo.engines import settings
from oscar_zoo.engines.setting_flags import BACKEND, OPTIONS
from oscar_zoo.engines.sglang import refusals
from oscar_zoo.engines.sglang.sizing import SizeFlags
from oscar_zoo.errors import PathNotFound, UnsupportedMachine, UsageError
from oscar_zoo.models.config_file import read_config

_DENIED = {
    "it runs code from the model repository": "--trust-remote-code",
    "use --expose with an API key": "--host",
    "use oscar-zoo serve --port": "--port",
    "arguments are visible to every local user; use --api-key-file": "--api-key",
    "arguments are visible to every local user": (
        "--admin-api-key --ssl-keyfile-password --watermark-key --watermark-key-b"
    ),
    "use oscar-zoo serve --model": "--model-path --model",
    "serve always runs the INT2 cache": "--kv-cache-dtype",
    "a configuration file could set any of the refused flags": "--config",
    "it unpickles code from requests": "--enable-custom-logit-processor",
    "it imports code by name": "--custom-weight-loader --custom-sigquit-handler --forward-hooks",
    "serve gives the server its own verified copy": "--oscar-rotation-path --oscar-artifact",
    "serve says what it verified": "--oscar-name --oscar-copy-of",
    "serve sets it from the copy it wrote": "--oscar-rotation-sha256",
    "serve always has its front": "--oscar-front",
    "use --device in front of --": "--device",
    "use --device cuda:N in front of --": "--base-gpu-id",
    "it runs a module by name": "--sidecar --sidecar-args",
    "it lets answers of the model run tools": "--tool-server",
    "it runs templates from requests": "--trust-request-chat-template",
    "it unpickles a checkpoint": "--modelopt-checkpoint-restore-path",
    "it opens a server without the API key": (
        "--grpc-mode --smg-grpc-mode --grpc-port --grpc-http-sidecar-port"
        " --smg-http-sidecar-port --gated-launch-port"
    ),
    "it publishes prompts, unless at tcp://127.0.0.1:PORT alone": "--kv-events-config",
    "it publishes the load to the network": "--load-publish-endpoint",
    "processes of several machines exchange pickles over the network": (
        "--dist-init-addr --nccl-init-addr --nnodes --node-rank --use-ray"
    ),
    "encoders on other machines are reached without a key": "--language-only",
    "weights would come over the network, unchecked": "--modelexpress-config",
    "the model would not be the one that was checked": "--decrypted-config-file",
}
DENIED_FLAGS = {flag: reason for reason, flags in _DENIED.items() for flag in flags.split()}
"""Engine flags that `serve` refuses after `--`, with the reason that the user reads. A test holds
the list against the flags of every supported release."""

DENIED_FAMILIES = {
    "--disaggregation-": "disaggregation with an INT2 cache is not supported",
    "--encoder-": "encoders on other machines are reached without a key",
    "--decoupled-spec-": "speculative decoding with an INT2 cache is not supported",
    "--hicache-storage-": (
        "it imports code by name, and pages that outlive a server do not name their artifact"
    ),
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
DRAFT_MODEL = ("--speculative-draft-model-path", "--speculative-draft-model")
"""The names of one flag."""
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
"""The names of one flag."""
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
ATTENTION_DATA_PARALLEL = ("--attn-dp-size", "--attention-data-parallel-size")
DP_ATTENTION = "--enable-dp-attention"
UNKNOWN_WEIGHTS = "--quantization --cpu-offload-gb --load-format --json-model-override-args".split()
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


EVENTS_HERE = '--kv-events-config=\'{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}\''


def check_extra_flags(extra: Sequence[str]) -> None:
    """Refuse engine flags that would open the server or replace what `serve` guarantees, and
    abbreviations that the engine's parser would complete to one."""
    for place, token in enumerate(extra):
        if not token.startswith("-") or token.lstrip("-").split("=")[0].replace(".", "").isdigit():
            continue
        if any(ord(c) < 32 for c in token):
            raise UsageError("an engine flag holds a control character.")
        name = token.split("=", 1)[0].replace("_", "-")
        reason = _reason_against(name)
        value = token.partition("=")[2] or " ".join(extra[place + 1 : place + 2])
        events = name == "--kv-events-config"
        if reason is not None and not (events and _stays_here(value)):
            hint = EVENTS_HERE if events else "try: oscar-zoo serve --help"
            raise UsageError(f"{name} is not allowed after --: {reason}.", hint=hint)


def _stays_here(text: str) -> bool:
    """Whether events are published on this machine alone; without an endpoint, on all addresses."""
    try:
        given = json.loads(text)
        ends = [given["endpoint"], given.get("replay_endpoint") or given["endpoint"]]
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return all(re.fullmatch(r"tcp://127\.0\.0\.1:\d+", str(end)) for end in ends)


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


OTHER_NAMES = {
    "--attention-context-parallel-size": "--attn-cp-size",
    "--decode-context-parallel-size": "--dcp-size",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-hicache": "--enable-hierarchical-cache",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-prefill-context-parallel": "--enable-prefill-cp",
    "--pipeline-parallel-size": "--pp-size",
}
"""Second names of flags that a row refuses, in any tested release of SGLang."""
ALGORITHM = "--speculative-algorithm"
NEED_DRAFT_MODELS = ("EAGLE", "EAGLE3", "STANDALONE")
"""Not `NEXTN`, whose drafts come from layers of the model itself."""
MEMORY = "--mem-fraction-static"
GRAPHS = re.compile(r"cuda_graph_backend_(?P<phase>prefill|decode)")


def check_flags(flags: UserFlags, device: str) -> None:
    """Refuse engine flags that the server would refuse on `device`, `cpu` or `cuda`."""
    config = _configuration(flags, device)
    refusals.check_rows(config, refusals.SERVER, UsageError)
    if flags.last(OPTIONS["disk_cache"].flag) is not None:
        refusals.check_rows(config, refusals.ON_DISK, UsageError)
    _check_fraction(flags.text(MEMORY))
    _check_drafts(getattr(config, "speculative_algorithm", None), flags, device)
    for option in OPTIONS.values():
        text = flags.text(*option.names)
        if text is not None:
            option.parse(text, option.flag)


def check_latents(flags: UserFlags, device: str, bits: Collection[int]) -> None:
    """Refuse what a server of latents with codes of `bits` would refuse."""
    config, sizes = _configuration(flags, device), flags.sizes()
    config.dp_size, config.pp_size = sizes.data_parallel, sizes.pipeline_parallel
    refusals.check_latents(config, None, bits)


def replaced_backends(flags: UserFlags) -> tuple[str, ...]:
    """One sentence for each attention backend of the user that the plugin replaces by its own."""
    names = ["--" + name.replace("_", "-") for name in refusals.BACKENDS]
    return tuple(
        f"{name} {text} is replaced by {BACKEND}, which alone reads an INT2 cache"
        for name in names
        if (text := flags.text(name)) in refusals.FORK_BACKENDS
    )


def _check_fraction(text: str | None) -> None:
    """Refuse a share of memory outside of 0 to 1, which SGLang itself accepts."""
    try:
        possible = text is None or 0.0 < float(text) <= 1.0
    except ValueError:
        possible = False
    if not possible:
        raise UsageError(
            f"{MEMORY} {text!r} is no share of the memory: it lies above 0 and is at most 1.",
            hint=f"for example -- {MEMORY}=0.8",
        )


def _check_drafts(algorithm: Any, flags: UserFlags, device: str) -> None:
    """Refuse speculative decoding that SGLang would give up only after it has loaded weights."""
    path = flags.text(*DRAFT_MODEL)
    if algorithm is None:
        return
    if device == "cpu":
        raise needs_gpu(ALGORITHM)
    if str(algorithm).upper() in NEED_DRAFT_MODELS and path is None:
        raise UsageError(
            f"{ALGORITHM} {algorithm} needs a draft model.",
            hint=f"name one: {DRAFT_MODEL[0]} MODEL; without one: {ALGORITHM} NGRAM",
        )
    if path is not None and path.startswith(("./", "../", "/", "~")):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise PathNotFound.for_path(path, "model folder")
        read_config(folder)


def needs_gpu(option: str) -> UnsupportedMachine:
    """The error for `option`, which asks for speculative decoding on a CPU."""
    return UnsupportedMachine(
        f"{option} needs a GPU: the functions that accept drafts run only there.",
        hint=f"leave out {option}, or serve on a GPU",
    )


def check_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse variables that the server would refuse; `environ` is its whole environment."""
    refusals.check_server(SimpleNamespace(), environ, eager_only=False)
    return settings.check(environ)


def _configuration(flags: UserFlags, device: str) -> SimpleNamespace:
    """The flags as attributes under SGLang's names, and the settings of CUDA graphs."""
    config = SimpleNamespace(device=device, cuda_graph_config=SimpleNamespace())
    for flag in flags.given:
        name, text = _whole(flag.name)[2:].replace("-", "_"), flag.value
        graphs = GRAPHS.fullmatch(name)
        if graphs is not None:
            setattr(config.cuda_graph_config, graphs["phase"], SimpleNamespace(backend=text))
        elif name in refusals.BACKENDS and text in refusals.FORK_BACKENDS:
            continue
        elif name not in ("device", "cuda_graph_config"):
            setattr(config, name, _value(text))
    return config


def _whole(flag: str) -> str:
    """The flag that the engine's parser takes `flag` for: a second name, or the beginning of
    one."""
    if flag in OTHER_NAMES:
        return OTHER_NAMES[flag]
    names = {row.name.split()[0] for row in refusals.SERVER}
    longer = {name for name in names if name.startswith(flag)}
    return flag if flag in names or len(longer) != 1 else longer.pop()


def _value(text: str | None) -> Any:
    if text is None:
        return True
    try:
        return float(text)
    except ValueError:
        return text
