"""The command line of an engine that calibrates: what the capture decides, and which flags of a
user it takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import UsageError

ROOM = 512
"""Tokens of context and cache beyond the longest sequence. SGLang needs a few for itself, and it
allocates whole pages of up to 128 tokens."""
ALONE = "every sequence runs alone and in one piece"
SHARES = "every rank must hold its share of the heads of every layer"
GRAPHS = "taps run in every layer, so the engine has no CUDA graphs"
DRAFTS = "a draft model would be summed, too"
RANKS = "use --tensor-parallel in front of --"
REFUSED_FLAGS = {
    "--model-path": "the model is named in front of --",
    "--model": "the model is named in front of --",
    "--revision": "use --revision in front of --",
    "--device": "use --device in front of --",
    "--base-gpu-id": "use --device cuda:N in front of --",
    "--dtype": "use --dtype in front of --",
    "--tp-size": RANKS,
    "--tensor-parallel-size": RANKS,
    "--pp-size": SHARES,
    "--pipeline-parallel-size": SHARES,
    "--dp-size": SHARES,
    "--data-parallel-size": SHARES,
    "--attn-dp-size": SHARES,
    "--attention-data-parallel-size": SHARES,
    "--enable-dp-attention": SHARES,
    "--attn-cp-size": SHARES,
    "--attention-context-parallel-size": SHARES,
    "--dcp-size": SHARES,
    "--decode-context-parallel-size": SHARES,
    "--enable-prefill-cp": SHARES,
    "--kv-cache-dtype": "the engine keeps keys and values in the type of the model",
    "--skip-tokenizer-init": "compute makes the tokens itself",
    "--disable-cuda-graph": GRAPHS,
    "--disable-radix-cache": ALONE,
    "--disable-overlap-schedule": ALONE,
    "--sleep-on-idle": "the engine sleeps between its jobs in any case",
    "--chunked-prefill-size": ALONE,
    "--max-prefill-tokens": ALONE,
    "--max-total-tokens": ALONE,
    "--max-running-requests": ALONE,
    "--context-length": "use --seq-len in front of --",
    "--enable-two-batch-overlap": ALONE,
}
"""SGLang's flags that a capture decides, with the reason that the user reads."""
REFUSED_FAMILIES = {
    "--cuda-graph-": GRAPHS,
    "--oscar-": "the engine runs without an INT2 cache",
    "--speculative-": DRAFTS,
}
"""The same for every flag whose name begins so."""
BACKENDS = ("--attention-backend", "--prefill-attention-backend")
HELP = "oscar-zoo compute --help"


def read_flags(words: Sequence[str]) -> UserFlags:
    """Read the flags behind `--` of `compute`, and refuse those that the capture decides.

    Raises:
        UsageError: naming the flag and the reason; also what `serve` refuses of every engine.
    """
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and (reason := reason_against(name)) is not None:
            raise UsageError(f"{name} is not allowed after --: {reason}.", hint=HELP)
    try:
        return UserFlags(words)
    except UsageError as error:
        raise UsageError(error.message, hint=HELP) from None


def check_backend(flags: UserFlags, device: str, dtype: str) -> None:
    """Refuse an attention backend that computes wrongly on `device`.

    Args:
        flags: of the user.
        device: `cpu` or `cuda[:N]`.
        dtype: type of the weights in memory; `auto` keeps the stored one.

    Raises:
        UsageError: Triton on a CPU, whose interpreter gives wrong numbers in bfloat16.
    """
    triton = any(flag.name in BACKENDS and flag.value == "triton" for flag in flags.given)
    if triton and device == "cpu" and dtype != "float32":
        raise UsageError(
            "the attention backend triton computes wrongly in bfloat16 on a CPU.",
            hint="leave it out, or add --dtype float32 in front of --",
        )


def reason_against(name: str) -> str | None:
    """Why the flag `name`, or one that SGLang would complete it to, is refused; else `None`."""
    for refused, reason in REFUSED_FLAGS.items():
        if refused == name or (len(name) > 3 and refused.startswith(name)):
            return reason
    for family, reason in REFUSED_FAMILIES.items():
        if name.startswith(family) or (len(name) > 3 and family.startswith(name)):
            return reason
    return None


def command_line(
    model: str,
    longest: int,
    tensor_parallel: int,
    given: Mapping[str, str | int | float],
    flags: UserFlags,
) -> tuple[str, ...]:
    """Every sequence alone, in one piece, without graphs or caches.

    Args:
        model: folder or Hugging Face id.
        longest: tokens of the longest sequence.
        tensor_parallel: number of ranks.
        given: what else `compute` decides, such as `device`, `dtype` and `revision`.
        flags: of the user; they come last and win.
    """
    room = longest + ROOM
    values = {
        "model-path": model,
        "tp-size": tensor_parallel,
        "kv-cache-dtype": "auto",
        "chunked-prefill-size": room,
        "max-prefill-tokens": room,
        "max-total-tokens": room,
        "max-running-requests": 1,
        "context-length": room,
        "random-seed": 0,
        "watchdog-timeout": 3600,
        **given,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return (*words, *SWITCHES, *flags.words)


SWITCHES = (
    "--skip-tokenizer-init",
    "--disable-cuda-graph",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # fits are made and measured between its jobs
)
