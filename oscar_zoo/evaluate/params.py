"""What `eval` and `ruler` take, and what the lists in their options mean.

Needs no torch and no pydantic, so that `--help` is fast. Lists stay as they were typed until a verb
runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.benchmarks.tasks import NAMES
from oscar_zoo.registry import params as shared
from oscar_zoo.registry.params import model_text
from oscar_zoo.verb import Arg, Opt, checked, parameters_of

T = TypeVar("T")

Artifact = Annotated[str | Path, Arg("An artifact.", "NAME|DIR", complete="names_or_paths")]
EngineFlags = Annotated[tuple[str, ...], Arg("Flags of the engine.", "[-- ENGINE FLAGS]")]
Model = Annotated[str | None, shared.SERVED_MODEL]
Revision = Annotated[str | None, shared.REVISION]
File = Path | None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which weights, and their type."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16"], shared.DTYPE] = "auto"
    revision: Revision = None


@dataclass(frozen=True, kw_only=True)
class Hubs:
    """Where the artifact comes from."""

    offline: Annotated[bool, shared.OFFLINE] = False
    hubs: Annotated[tuple[str, ...], shared.ASKED_HUBS] = ()


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Where the model runs."""

    device: Annotated[str | None, shared.DEVICES] = None
    stream_weights: Annotated[bool | None, shared.STREAM_WEIGHTS] = None


@dataclass(frozen=True, kw_only=True)
class Servers:
    """What `eval --engine sglang` starts, or where it looks."""

    engine: Annotated[
        Literal["transformers", "sglang", "vllm"] | None,
        Opt(
            "Compare what runs with the simulated cache: sglang or vllm a server, which the options"
            " from --url on are for; transformers an OscarCache. [default: only simulate]"
        ),
    ] = None
    url: Annotated[str | None, Opt("Measure this server instead of starting one.", "URL")] = None
    chunk: Annotated[str, Opt("Prefill chunks. [default: 512]", "N,...")] = "512"
    page_size: Annotated[str, Opt("Page sizes. [default: 1]", "N,...")] = "1"
    radix: Annotated[str, Opt("Prefix cache. [default: on]", "on,off")] = "on"
    tp: Annotated[str, Opt("Tensor-parallel ranks. [default: 1]", "N,...")] = "1"
    sweep: Annotated[
        bool,
        Opt(
            "--chunk 512,8192 --page-size 1,16 --radix on,off, and --tp 1,2 where there are two"
            " GPUs."
        ),
    ] = False
    full: Annotated[bool, Opt("Start every combination, not every pair of values.")] = False
    csv: Annotated[File, Opt("Also write a line per server to this file.", "FILE")] = None
    timeout: Annotated[
        float,
        Opt(
            "How long the start of a server may take, and one answer. [default: 1800]",
            "SECONDS",
            least=1,
        ),
    ] = 1800.0


@dataclass(frozen=True, kw_only=True)
class Benchmarks:
    """How benchmarks are asked of servers, and what is kept."""

    base_url: Annotated[str | None, Opt("BF16 server beside the one of --url.", "URL")] = None
    fp8: Annotated[bool, Opt("Measure an FP8 cache too.")] = False
    seeds: Annotated[
        int | None,
        Opt(
            "Ask everything N times. [default: 3; 1 where nothing is drawn at random]",
            "N",
            least=1,
            most=100,
        ),
    ] = None
    limit: Annotated[int | None, Opt("Only the first N questions.", "N", least=1)] = None
    concurrency: Annotated[
        int, Opt("Questions at a time. [default: 16]", "N", least=1, most=1024)
    ] = 16
    max_new_tokens: Annotated[
        int | None,
        Opt(
            "Tokens of an answer. [default: as the task says, within the model's context]",
            "N",
            least=1,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Opt(
            "Of sampling; 0 is greedy. [default: as the model's generation_config.json says]",
            "X",
            least=0,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Opt(
            "Of sampling. [default: as the model's generation_config.json says]",
            "X",
            least=1e-6,
            most=1,
        ),
    ] = None
    thinking: Annotated[
        bool | None, Opt("Tell the chat template. [default: as the template does]")
    ] = None
    run_code: Annotated[
        bool,
        Opt(
            "Allow tasks that run programs of the model on this machine (humaneval).",
            flag="--run-model-code",
        ),
    ] = False
    fresh: Annotated[bool, Opt("Drop the answers of an earlier run.")] = False
    output: Annotated[
        File,
        Opt("Where to write the scores. [default: with the other scores of the artifact]", "FILE"),
    ] = None


@dataclass(frozen=True)
class EvalParams(Weights, Servers, Benchmarks, Hubs, Devices):
    """Measure a cache against BF16, plain INT2 and Hadamard INT2, with the model loaded in this
    process.

    The artifact is a NAME, or a folder that begins with ./, ../, / or ~. A MODEL is found as for
    oscar-zoo compute.

    Perplexity and recall use the sink, recent and INT2 layout exactly at every query position.

    One value of --sink, --recent, --clip or --group-size takes the place of the recipe's for every
    cache. With several, BF16 and the artifact under every combination are measured, and no scores
    are kept.

    With --against, caches of other methods stand beside the artifact: their bits, how far they move
    what the model says next (KL), perplexity, digits and whole answers recalled. A name alone means
    all its bits. Names: fp8, fp8-scaled, int4, k4v2, int2, hadamard, hadamard-clip, kivi,
    kivi-windows, kivi-token, omni-scaled, turboquant, turboquant-prod, lmdeploy, artifact, all. No
    scores are kept.

    With --engine sglang the artifact is served by stock SGLang, and its perplexity is computed from
    the server's own log-probabilities, cold and behind a prefix-cache hit; recall is asked for in
    conversations of three turns that reuse the cache, and once more without reuse. The reference in
    this process has the same chunks. The exit code is 1 when they differ. Lists such as --chunk
    512,8192 start a server for every pair of values; --sweep is the whole list. With --engine
    transformers it is the perplexity of an OscarCache, as model.generate uses it, in this process.

    --task sessions runs sessions of an agent, made of code that comes with this package: turns of a
    user, calls of tools, edits, and questions about earlier turns. It tells how far each cache
    moves what the model says next (KL), by position; which calls of tools still parse, and which
    are the same as with BF16; and which names of earlier turns are recalled. No scores are kept.

    A benchmark as --task is asked of a server with the INT2 cache, then of one with a BF16 cache,
    under the same settings. Answers are kept as they come, so the same command goes on where it
    stopped. The benchmark sample needs no network.

    \b
    Examples:
      oscar-zoo eval ./my-rotation --model ./my-model --task perplexity --data text.txt
      oscar-zoo eval Qwen3-8B --json
      oscar-zoo eval Qwen3-8B --sink 0,64 --recent 128,256,512
      oscar-zoo eval Qwen3-8B --clip 0.96,0.92 --clip 0.9,0.9 --group-size 32,64
      oscar-zoo eval Qwen3-8B --against fp8,kivi,turboquant:2.5 --plot loss.svg
      oscar-zoo eval Qwen3-8B --task sessions --length 32768 --windows 1
      oscar-zoo eval Qwen3-8B --engine sglang --chunk 512,8192 --csv servers.csv
      oscar-zoo eval Qwen3-8B --engine transformers --windows 1
      oscar-zoo eval Qwen3-8B --engine vllm --url http://127.0.0.1:30000
      oscar-zoo eval Qwen3-8B --task gpqa_diamond --task aime25 --seeds 5
      oscar-zoo eval Qwen3-8B --task math500 --data math500.jsonl --output scores.json
    """

    artifact: Artifact
    _: KW_ONLY
    engine_flags: EngineFlags = ()
    model: Model = None
    tasks: Annotated[
        tuple[str, ...],
        Opt(
            f"perplexity, recall, sessions, or a benchmark: {', '.join(NAMES)}; can be repeated."
            " [default: perplexity and recall]",
            "TASK",
            flag="--task",
            complete="tasks",
        ),
    ] = ()
    data: Annotated[
        str | None,
        Opt(
            "Text file, or a text known by name; of a benchmark, its rows. [default: manuals; the"
            " benchmark's own data set]",
            "FILE|NAME",
        ),
    ] = None
    windows: Annotated[
        int | None,
        Opt("At most so many text windows, or sessions. [default: 6; 2 sessions]", "N", least=1),
    ] = None
    length: Annotated[
        int | None,
        Opt(
            "Tokens of a window or session. [default: up to 2048; 2000 of a server; up to 8192 of a"
            " session]",
            "N",
            least=2,
        ),
    ] = None
    answers: Annotated[
        int | None, Opt("Recall questions, in eights. [default: 64; 60 of a server]", "N", least=1)
    ] = None
    sink: Annotated[
        str | None, Opt("First tokens kept in BF16. [default: the recipe's]", "N,...")
    ] = None
    recent: Annotated[
        str | None, Opt("Last tokens kept in BF16. [default: the recipe's]", "N,...")
    ] = None
    clips: Annotated[
        tuple[str, ...],
        Opt("Clip ratios; can be repeated. [default: the recipe's]", "K,V", flag="--clip"),
    ] = ()
    group_size: Annotated[
        str | None, Opt("Channels per scale. [default: the recipe's]", "N,...")
    ] = None
    against: Annotated[
        str | None,
        Opt(
            "Measure caches of other methods too, such as fp8,kivi:2, or all.",
            "NAME[:BITS],...",
            complete="alternatives",
        ),
    ] = None
    plots: Annotated[
        tuple[Path, ...],
        Opt(
            "Of --against: draw loss against bits, an .html, .png or .svg file. Can be repeated.",
            "FILE",
            flag="--plot",
        ),
    ] = ()


Family = Literal[
    "single", "multi-key", "multi-value", "multi-query", "variables", "common-words", "documents"
]
Cache = Literal["bf16", "int2", "int2-hadamard", "int2-hadamard-clip", "artifact"]
CACHES: tuple[Cache, ...] = get_args(Cache)


@dataclass(frozen=True)
class RulerParams(Weights, Hubs, Devices):
    """Ask for facts in long prompts, with the cache of an artifact, BF16 and plain INT2.

    The prompts are of the families of RULER: one needle in a text, one of eight, all values of a
    key, several needles, variable tracking, the most common words of a list, and documents. An
    answer is right when every one of its tokens is the model's most likely one.

    The result is the share of right answers for each cache and length, and with --plot a map of
    length by depth for each cache.

    \b
    Examples:
      oscar-zoo ruler Qwen3-8B --lengths 4096,16384,65536 --plot map.html --plot map.png
      oscar-zoo ruler ./my-rotation --model ./my-model --family single --depths 11
      oscar-zoo ruler Qwen3-8B --url http://127.0.0.1:30000 --json
    """

    artifact: Artifact
    _: KW_ONLY
    model: Model = None
    families: Annotated[
        tuple[Family, ...], Opt("Kind of prompts. Can be repeated. [default: all]", flag="--family")
    ] = ()
    lengths: Annotated[
        str | None,
        Opt(
            "Tokens of the prompts. [default: 1024 and its doubles up to what the model takes]",
            "N,...",
        ),
    ] = None
    depths: Annotated[
        int, Opt("Places of the fact that is asked for.", "N", least=1, most=101, shown=True)
    ] = 5
    samples: Annotated[
        int, Opt("Prompts for each family, length and depth.", "N", least=1, shown=True)
    ] = 4
    caches: Annotated[
        tuple[Cache, ...],
        Opt(
            "Cache to measure. Can be repeated. [default: all but int2-hadamard-clip]",
            flag="--cache",
        ),
    ] = ()
    servers: Annotated[
        tuple[str, ...],
        Opt(
            "Ask this running server, not a model in this process. Can be repeated.",
            "URL",
            flag="--url",
        ),
    ] = ()
    api_key_file: Annotated[File, shared.KEY_FILE] = None
    data: Annotated[
        str,
        Opt("Text between the facts: a file, or a text known by name.", "FILE|NAME", shown=True),
    ] = "manuals"
    seed: Annotated[int, Opt("The same seed gives the same prompts.", "N", least=0, shown=True)] = 0
    clip: Annotated[str | None, Opt("Clip ratios to use in place of the recipe's.", "K,V")] = None
    plots: Annotated[
        tuple[Path, ...],
        Opt(
            "Also draw the maps, length by depth: an .html or a .png file. Can be repeated.",
            "FILE",
            flag="--plot",
        ),
    ] = ()


def given(params: object, group: type) -> list[str]:
    """The fields of `group` that differ from their defaults."""
    return [
        row.name
        for row in parameters_of(type(params))
        if row.name in group.__annotations__ and getattr(params, row.name) != row.default
    ]


def flag_of(params: object, name: str) -> str:
    """The option of the field `name`."""
    says = next(row.says for row in parameters_of(type(params)) if row.name == name)
    return says.flag or f"--{name.replace('_', '-')}"


def again(verb: str, params: object) -> str:
    """The command line that means `params` with the folder of a model, for errors."""
    words: list[str] = [f"oscar-zoo {verb}"]
    flags: list[str] = []
    for row in parameters_of(type(params)):
        value: Any = "FOLDER" if row.name == "model" else getattr(params, row.name)
        if row.name == "engine_flags":
            flags = ["--", *map(shlex.quote, value)] if value else []
        elif isinstance(row.says, Arg):
            words += [] if value is None else [shlex.quote(str(value))]
        elif value != row.default:
            flag = flag_of(params, row.name)
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                every = value if isinstance(value, tuple) else (value,)
                words += [f"{flag} {shlex.quote(str(one))}" for one in every]
    return " ".join(words + flags)


def from_python(kind: Callable[..., T], artifact: str | Path, options: dict[str, Any]) -> T:
    """The parameters of a Python call: numbers and pairs in place of text, and one value in place
    of a list. Raises `UsageError` for what is none."""
    values: dict[str, Any] = {"artifact": artifact}
    for name, value in options.items():
        every = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        if value is None:
            continue
        if name == "clip":
            pairs: Sequence[Any] = [every] if isinstance(every[0], int | float) else every
            texts = [f"{c.k},{c.v}" if hasattr(c, "k") else f"{c[0]},{c[1]}" for c in pairs]
            values |= {"clips": tuple(texts)} if kind is EvalParams else {"clip": texts[0]}
        elif name in ("sink", "recent", "group_size", "lengths", "against"):
            values[name] = ",".join(map(str, every)) or None
        elif name in ("hubs", "tasks", "families", "caches", "servers"):
            values[name] = tuple(every)
        elif name == "extra":
            values["engine_flags"] = tuple(every)
        elif name == "model":
            values[name] = model_text(value)
        else:
            values[name] = str(value) if name == "data" else value
    return checked(kind, values)


def listed(text: str) -> tuple[str, ...]:
    """The words of a list such as `fa3,triton`."""
    return tuple(part.strip() for part in text.split(","))


def is_number(text: str) -> bool:
    """Whether it is a whole number from 1 on that counts tokens or requests."""
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 24


def numbers(option: str, text: str | None, *, least: int = 1) -> tuple[int, ...]:
    """The whole numbers from `least` on of a list such as `1,16`, each of them once."""
    parts = () if text is None else listed(text)
    if not all(is_number(part) or (part == "0" and least == 0) for part in parts):
        raise UsageError(
            f"{option} {text!r} is not a list of whole numbers from {least} on.",
            hint=f"for example {option} 1,16",
        )
    return tuple(dict.fromkeys(map(int, parts)))
