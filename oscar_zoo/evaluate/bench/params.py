"""What `bench serve` and `bench load` take. Needs no torch and no pydantic."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from oscar_zoo.evaluate.params import EngineFlags, File, Hubs, Model, Revision
from oscar_zoo.registry.params import DEVICE
from oscar_zoo.serving.params import Engine
from oscar_zoo.verb import Arg, Opt


@dataclass(frozen=True, kw_only=True)
class BenchDevice:
    """Where a server under measurement runs."""

    device: Annotated[str | None, DEVICE] = None


Benched = Annotated[str | Path | None, Arg("An artifact.", "[NAME|DIR]", complete="names_or_paths")]


@dataclass(frozen=True)
class BenchServeParams(Hubs, BenchDevice):
    """Start stock SGLang or vLLM with a BF16 cache, with an FP8 cache, and then with the plugin and
    an INT2 cache, and send all the same prompts.

    For every batch and context: the time until the last request of the batch has its first token,
    milliseconds per token (median over the last three quarters of the new tokens, while all
    requests run), tokens per second of the whole batch, and how many tokens the cache holds. Before
    a case is timed, a batch of as many requests runs, one of them with a prompt of that length, so
    that compiling is not counted. Then it is timed --repeats times, each time with other prompts.
    The table has the medians, and behind ± how far the farthest repeat was from them. Prompts are
    random tokens; the prefix cache is off, unless --turns asks for conversations.

    With several backends in --baseline, BF16 and FP8 are measured with each of them. The table says
    which is best in each case, by the time per token, and INT2 is compared with that one.

    The artifact is found and verified as for oscar-zoo serve. With --dummy-weights nothing needs to
    be there: weights are random, and without an artifact the rotation is a Hadamard matrix. The
    speed depends on neither.

    Everything after -- goes to all engines, except flags that would make them differ. A side that
    fails is reported and the others still run; the exit code is 1 then. Where no GPU is found, a
    model with more than 2 GB of weights is refused unless --device cpu says that it is meant.

    \b
    Examples:
      oscar-zoo bench serve Qwen3-8B --csv figures.csv --plot figures.png
      oscar-zoo bench serve --dummy-weights Qwen3-8B --batch 1 --context 100000
      oscar-zoo bench serve --dummy-weights Qwen3-8B --cases 1x100000,16x30000,64x8000
      oscar-zoo bench serve --dummy-weights Qwen3-8B --caches bf16,int2 --repeats 5
      oscar-zoo bench serve --dummy-weights Qwen3-8B --baseline flashinfer,fa3,triton
      oscar-zoo bench serve --dummy-weights Qwen3-8B --engine vllm
      oscar-zoo bench serve --dummy-weights Qwen3-8B --job 64x30000x512
      oscar-zoo bench serve --dummy-weights Qwen3-8B --job 64x16000x256 --turns 2
      oscar-zoo bench serve --dummy-weights ./my-model -- --tp=2 --mem-fraction-static=0.8
    """

    artifact: Benched = None
    _: KW_ONLY
    engine_flags: EngineFlags = ()
    engine: Annotated[Engine, Opt("What is measured.", shown=True)] = "sglang"
    batch: Annotated[str | None, Opt("Requests at the same time.  [default: 1,16]", "N,...")] = None
    context: Annotated[str | None, Opt("Tokens of a prompt.  [default: 8000,30000]", "N,...")] = (
        None
    )
    cases: Annotated[
        str | None,
        Opt(
            "Measure these, such as 1x100000,64x8000, in place of every batch with every context.",
            "NxPROMPT,...",
        ),
    ] = None
    new_tokens: Annotated[
        int, Opt("Tokens every request generates.", "N", least=8, most=100_000, shown=True)
    ] = 96
    repeats: Annotated[
        int,
        Opt(
            "How often each case is timed; the table has medians.",
            "N",
            least=1,
            most=100,
            shown=True,
        ),
    ] = 3
    caches: Annotated[str, Opt("Caches to measure, in this order.", "CACHE,...", shown=True)] = (
        "bf16,fp8,int2"
    )
    job: Annotated[
        str | None,
        Opt(
            "Also time N requests that all come at once, such as 64x30000x512, until the last is"
            " answered.",
            "NxPROMPTxANSWER",
        ),
    ] = None
    turns: Annotated[
        int,
        Opt(
            "Turns of the job: every request goes on as a conversation, 64 tokens longer with each"
            " turn.",
            "N",
            least=1,
            most=16,
            shown=True,
        ),
    ] = 1
    dummy_weights: Annotated[
        str | Path | None,
        Opt(
            "Measure a model of this shape with random weights: a name of the zoo, or a folder with"
            " a config.json.",
            "NAME|DIR",
        ),
    ] = None
    model: Model = None
    revision: Revision = None
    baselines: Annotated[
        tuple[str, ...],
        Opt(
            "Attention backends to measure BF16 and FP8 with; INT2 is compared with the best."
            " [default: flashinfer; torch_native on a CPU; what vLLM chooses]",
            "BACKEND,...",
            flag="--baseline",
        ),
    ] = ()
    csv: Annotated[File, Opt("Also write the figures to this file.", "FILE")] = None
    plot: Annotated[File, Opt("Also draw them; needs matplotlib.", "FILE.png")] = None
    timeout: Annotated[
        float,
        Opt(
            "How long the start of an engine may take, each repeat of a case, and the job.",
            "SECONDS",
            least=1,
            shown=True,
        ),
    ] = 1800


@dataclass(frozen=True)
class BenchLoadParams(Hubs, BenchDevice):
    """Start an INT2 server, let many streaming clients work with it, and end it with SIGTERM.

    Every client sends one request after the other; some hang up while theirs waits, is prefilled,
    or streams. The exit code is 1 when a request fails whose client did not hang up, memory of the
    processes or of the GPU grows, a token slot stays taken when all is over, the same prompts have
    other answers afterwards, or SIGTERM cuts off a running request, leaves /health inviting more,
    or does not end the server. Ctrl-C or SIGTERM ends the run early and keeps what was measured.

    \b
    Examples:
      oscar-zoo bench load Qwen3-8B
      oscar-zoo bench load --dummy-weights Qwen3-8B --clients 200 --seconds 600 --json
    """

    artifact: Benched = None
    _: KW_ONLY
    engine_flags: EngineFlags = ()
    clients: Annotated[
        int, Opt("Clients at work at the same time.", "N", least=1, most=2000, shown=True)
    ] = 200
    seconds: Annotated[
        float,
        Opt("How long clients begin new requests.", "N", least=1, most=86_400, shown=True),
    ] = 600
    context: Annotated[
        int,
        Opt(
            "Tokens of the longest prompt; they are mixed, and most share a prefix with others.",
            "N",
            least=2,
            most=1 << 20,
            shown=True,
        ),
    ] = 4000
    new_tokens: Annotated[
        int, Opt("Tokens of the longest answer.", "N", least=1, most=100_000, shown=True)
    ] = 256
    aborts: Annotated[
        float,
        Opt("Of the requests whose client hangs up.", "SHARE", least=0, most=0.9, shown=True),
    ] = 0.2
    growth: Annotated[
        int,
        Opt(
            "How much more memory the end of the run may take than its middle.",
            "MIB",
            least=1,
            shown=True,
        ),
    ] = 256
    dummy_weights: Annotated[
        str | Path | None,
        Opt("A model of this shape with random weights, as for bench serve.", "NAME|DIR"),
    ] = None
    model: Model = None
    revision: Revision = None
    timeout: Annotated[
        float,
        Opt(
            "How long the start may take, and the answer to one request.",
            "SECONDS",
            least=1,
            shown=True,
        ),
    ] = 1800
