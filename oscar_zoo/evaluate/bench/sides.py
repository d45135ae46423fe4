"""The engines of a comparison: as command lines, of which only the cache and its attention differ,
and as processes, whose news are followed until they end.

A side that fails keeps every repeat it measured and says in one line why it ended.

Prompts are random token ids, so no side loads a tokenizer, and the prefix cache is off. A run with
conversations turns it on, with the schedule that finds most prefixes in a cache that is too small
for all of them. A model without weights and an artifact without data are made here too: the time
per token does not depend on the numbers in the cache, but experts of a mixture get equal load.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_zoo import children
from oscar_zoo.artifact.formats import Role, hadamard_set
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines import settings
from oscar_zoo.engines.sglang.launch import plan, server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, child_environment, rank_port
from oscar_zoo.engines.sglang.launch.starting import CACHE_TYPES, NO_PLUGIN
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.offline_process import Bulk, Case, OfflineJob
from oscar_zoo.engines.sglang.sizing import CPU_FLAGS, device_flags, device_switches
from oscar_zoo.engines.vllm import command as vllm
from oscar_zoo.engines.vllm.register import DTYPE
from oscar_zoo.errors import FlagRefused, ServerFailed, UsageError
from oscar_zoo.evaluate.bench.report import Cache, CaseResult, Figures, JobResult, Side, Turn
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models import config_file
from oscar_zoo.models.config_file import POSITIONS, with_positions
from oscar_zoo.registry.recipe import ModelRecipe, config_of_recipe

REFUSED_FLAGS = {
    "--attention-backend": "for the sides without INT2 use --baseline",
    "--prefill-attention-backend": "for the sides without INT2 use --baseline",
    "--decode-attention-backend": "for the sides without INT2 use --baseline",
    "--kv-cache-dtype": "use --caches",
    "--load-format": "use --dummy-weights",
    "--revision": "use oscar-zoo bench serve --revision",
}
OURS = "--oscar-"
"""How the names of the plugin's flags begin, which only the INT2 side has."""
ORDERED = 128
"""Maximum number of waiting requests that SGLang orders by their cached prefixes."""
BASELINE_ROWS = 256
"""Concurrent requests of a job on a stock side, whose rows cost almost no memory."""
_POOL = "--max-total-tokens"
_BACKEND = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class Engines:
    """What all sides share, and what only the INT2 side needs: `rotations`, a private folder with
    files of the digest `rotations_sha256`, a copy of an artifact with the digest `copy_of`."""

    model: str
    random_weights: bool
    rotations: Path
    rotations_sha256: str
    copy_of: str
    recipe: ServingRecipe
    device: str
    kernels: Path  # private folder of compiled kernels
    cases: tuple[Case, ...]
    new_tokens: int
    repeats: int
    requests: int  # at a time, unless the largest case has more
    port: int  # engines take the ports of their workers near it
    revision: str | None = None
    flags: UserFlags = field(default_factory=UserFlags)
    bulk: Bulk | None = None
    gpu: int = 0
    engine: str = "sglang"


_OF_JOB = ("cases", "new_tokens", "repeats", "bulk")
"""Fields that a job has too."""


def all_sides(caches: Sequence[Cache], backends: Sequence[str]) -> list[Side]:
    for backend in backends:
        if not _BACKEND.fullmatch(backend):
            raise UsageError(
                f"--baseline {backend!r} is not the name of an attention backend.",
                hint="for example --baseline flashinfer,fa3,triton",
            )
    stock = tuple(dict.fromkeys(backends)) or (None,)
    chosen = {cache: (None,) if cache == "int2" else stock for cache in caches}
    return [
        Side(cache, backend, alone=len(several) == 1)
        for cache, several in chosen.items()
        for backend in several
    ]


def read_flags(words: Sequence[str], engine: str = "sglang") -> UserFlags:
    """Those behind `--`; refuses those that would make the sides differ."""
    if engine == "vllm":
        vllm.check_words(words := vllm.spelled(words))
    for word in (word for word in words if word.startswith("--")):
        name = word.partition("=")[0].replace("_", "-")
        for refused, reason in REFUSED_FLAGS.items():
            if name == refused or (len(name) > 3 and refused.startswith(name)):
                raise UsageError(
                    f"{name} is not allowed after --: {reason}.",
                    hint="try: oscar-zoo bench serve --help",
                )
    return UserFlags(words)


def arguments(side: Side, engines: Engines) -> tuple[str, ...]:
    """The engine's command line for one side; flags of the user come last and win."""
    of_vllm = engines.engine == "vllm"
    flags = {"--model" if of_vllm else "--model-path": engines.model}
    if engines.revision is not None:
        flags["--revision"] = engines.revision
    flags |= {"--load-format": "dummy"} if engines.random_weights else {}
    talks = engines.bulk is not None and engines.bulk.turns > 1
    if of_vllm:
        kind = {"bf16": "auto", "int2": DTYPE}.get(side.cache, side.cache)
        flags |= {"--kv-cache-dtype": kind, vllm.REQUESTS: str(_rows(side, engines))}
        if side.backend is not None:
            flags["--attention-backend"] = side.backend.upper()
        prefixes = f"--{'' if talks else 'no-'}enable-prefix-caching"
        return (*_spelled(flags), "--skip-tokenizer-init", prefixes, *engines.flags.words)
    flags["--port"] = str(engines.port)
    if engines.gpu:
        flags["--base-gpu-id"] = str(engines.gpu)
    if side.cache == "int2":
        flags |= _int2_flags(engines)
    else:
        flags["--attention-backend"] = str(side.backend)
        flags["--kv-cache-dtype"] = CACHE_TYPES[side.cache]
    flags |= device_flags(engines.device)
    if engines.device == "cpu":  # where no memory fraction fits all cases
        needs = [case.batch * (case.context + engines.new_tokens) for case in engines.cases]
        need = max([*needs, engines.bulk.longest if engines.bulk else 1])
        flags[_POOL] = str(max(int(CPU_FLAGS[_POOL]), 2 * need))
    else:
        flags["--sampling-backend"] = "pytorch"
    flags["--max-running-requests"] = str(_rows(side, engines))
    words = engines.flags.words if side.cache == "int2" else engines.flags.without(OURS)
    prefixes = "--schedule-policy=lpm" if talks else "--disable-radix-cache"
    switches = ["--skip-tokenizer-init", prefixes, "--grammar-backend=none"]
    switches += device_switches(engines.device)
    return (*_spelled(flags), *switches, *words)


def _int2_flags(engines: Engines) -> dict[str, str]:
    where = settings.ArtifactSource(folder=str(engines.rotations))
    digest, recipe = engines.rotations_sha256, engines.recipe
    return plan.cache_flags(where, digest, recipe, copy_of=engines.copy_of)


def _spelled(flags: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in flags.items()]


def job(side: Side, engines: Engines, folder: Path) -> OfflineJob:
    ranks = () if engines.engine == "vllm" else rank_port(engines.flags)
    words, news = (*ranks, *arguments(side, engines)), str(folder / f"{side.name}.news")
    same: Any = {name: getattr(engines, name) for name in _OF_JOB}
    return OfflineJob(arguments=words, news=news, **same)


def command(
    side: Side, engines: Engines, place: Path, environ: Mapping[str, str]
) -> plan.LaunchPlan:
    """The child process of one side; it reads `place`, which holds its `job`."""
    device = "cpu" if engines.device == "cpu" else None
    env = child_environment(environ, device=device, kernels=engines.kernels)
    if engines.engine == "vllm":
        own = vllm.settings_of(_spelled(_int2_flags(engines)))
        own = own if side.cache == "int2" else {"VLLM_PLUGINS": ""}
        env = vllm.environment(env, engines.gpu) | own
        return plan.LaunchPlan(tuple(children.python(*vllm.OFFLINE, str(place))), env, "")
    # No server listens here, so the packages may come from where this process has its own.
    paths = [env.get("PYTHONPATH"), environ.get("PYTHONPATH")]
    if any(paths):
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if side.cache != "int2":
        env["SGLANG_PLUGINS"] = NO_PLUGIN
    program = (sys.executable, "-P", "-m", OfflineJob.__module__, str(place))
    return plan.LaunchPlan(program, env, "")


def _rows(side: Side, engines: Engines) -> int:
    """Number of concurrent requests: one more than the largest batch, because with 128 rows one of
    128 requests waited on every side."""
    stock_on_gpu = side.cache != "int2" and engines.device != "cpu"
    limit = max(engines.requests, BASELINE_ROWS) if stock_on_gpu else engines.requests
    waiting = min(engines.bulk.requests if engines.bulk else 1, limit)
    most = max([waiting, *(case.batch + 1 for case in engines.cases)])
    return most if engines.device == "cpu" else max(most, engines.requests)


ROOM = 128
"""Positions beyond the longest request, because SGLang keeps a few for itself."""
PREPARES_INPUT = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files without which SGLang does not start a model that has images, even for token ids."""


def written_config(recipe: ModelRecipe) -> dict[str, Any]:
    shapes = recipe.weights
    if shapes is None:
        raise UsageError(
            f"the zoo does not know all shapes of {recipe.name}.",
            hint="give a folder that holds its config.json",
        )
    return config_of_recipe(recipe).as_written | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": shapes.family,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "vocab_size": shapes.vocab_size,
        "max_position_embeddings": shapes.max_position,
        "tie_word_embeddings": shapes.tied_embeddings,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def write_model(
    folder: Path, config: dict[str, Any], *, longest: int, source: Path | None = None
) -> None:
    """Write `config` to the new folder `folder`, with positions for the `longest` request, and
    copy what prepares input from `source`."""
    config = copy.deepcopy(config)
    for part in with_positions(config):
        part[POSITIONS] = max(part[POSITIONS], longest + ROOM)
    folder.mkdir(mode=0o700)
    (folder / config_file.NAME).write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in PREPARES_INPUT if source else ():
        if source and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_rotations(folder: Path, geometry: Geometry) -> None:
    folder.mkdir(mode=0o700)
    roles: tuple[Role, Role] = ("k", "v")
    for role in roles:
        content = rotation_bytes(hadamard_set(geometry, role))
        (folder / f"{role}_rotation.pt").write_bytes(content)


POLL_SECONDS = 0.1
Arrivals = Sequence[tuple[float, int]]
"""One request: pairs of seconds since all were sent and tokens by then; both ascend."""


def measure(
    plan: LaunchPlan, job: OfflineJob, log: Path, side: Side, *, limit: float, progress: Progress
) -> None:
    """Run all cases of `job` in the child of `plan`, and put what was measured, failures included,
    into `side`. `limit` is in seconds for the start, and then for each repeat and the bulk."""
    offset = 0
    Path(job.news).touch()

    def news() -> Iterator[dict[str, Any]]:
        """The complete lines of a growing file, each once; ends at its current end."""
        nonlocal offset
        with Path(job.news).open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                if line.endswith(b"\n"):
                    offset += len(line)
                    yield json.loads(line)

    progress(0, 0, "engine start")
    try:
        with server.running(plan, log) as child:
            deadline = time.monotonic() + limit
            while True:
                ended = child.returncode is not None  # asked before its last words are read
                with child.signals_wait():
                    for item in news():
                        if "done" in item or "error" in item:
                            side.error = item.get("error")
                            return
                        if "progress" in item:
                            progress(item["progress"], job.total_tokens, "requests")
                        elif _take(item, side, job):
                            deadline = time.monotonic() + limit
                if ended:
                    raise child.failure("the engine ended")
                if time.monotonic() > deadline:
                    side.error = f"{_doing(side, job)} took longer than {limit:,.0f} s"
                    return
                time.sleep(POLL_SECONDS)
    except ServerFailed as error:
        side.error = error.message.rstrip(".")
        if isinstance(error, FlagRefused):
            raise
    except (KeyboardInterrupt, SystemExit):
        for item in news():  # written since the last read
            _take(item, side, job)
        side.error = f"{_doing(side, job)} was interrupted"
        raise


def _take(item: dict[str, Any], side: Side, job: OfflineJob) -> bool:
    """Put one item of news into `side`; return whether a timed step ended with it."""
    if "up" in item:
        side.start_s, side.capacity = float(item["up"]), int(item["capacity"])
        side.sglang, side.vllm, side.engine = *map(item.get, ("sglang", "vllm")), item["engine"]
        return True
    if "bulk" in item:
        turns = tuple(Turn(**turn) for turn in item["bulk"].get("turns", ()))
        side.job = JobResult(turns, item["bulk"].get("refused"))
    if "case" not in item:
        return False
    result = side.of(Case(**item["case"]))
    if result is None:
        result = CaseResult(**item["case"], wanted=job.repeats)
        side.cases.append(result)
    if "refused" in item:
        result.refuse(item["refused"])
    else:
        result.add(figures(item["arrivals"]))
    return True


def _doing(side: Side, job: OfflineJob) -> str:
    if side.start_s is None:
        return "the start"
    for case in job.cases:
        known = side.of(case)
        done = 0 if known is None else known.repeats
        if done < job.repeats and not (known and known.refused):
            which = f", repeat {done + 1} of {job.repeats}" if job.repeats > 1 else ""
            return f"the case {case}{which}"
    return "the end" if side.job is not None or job.bulk is None else "the job"


def figures(requests: Sequence[Arrivals]) -> Figures:
    """The figures of one batch, from one entry per request, each with at least one arrival.

    Decoding is timed while all requests run: from the first token of the last request to the end of
    the first one. The first quarter of the tokens in between is left out as warm-up.
    """
    firsts = [arrivals[0][0] for arrivals in requests]
    begin, end = max(firsts), min(arrivals[-1][0] for arrivals in requests)
    gaps, rates = list[float](), list[float]()
    for arrivals in requests:
        shared = [one for one in arrivals if begin <= one[0] <= end]
        steady = shared[len(shared) // 4 :]
        for (earlier, fewer), (later, more) in itertools.pairwise(steady):
            # Tokens that arrive together share their time.
            gaps += [(later - earlier) / (more - fewer)] * (more - fewer)
        seconds = steady[-1][0] - steady[0][0] if steady else 0
        if seconds > 0:
            rates.append((steady[-1][1] - steady[0][1]) / seconds)
    return {
        "ttft_s": begin,
        "ttft_median_s": statistics.median(firsts),
        "ms_per_token": 1000 * statistics.median(gaps) if gaps else None,
        "tokens_per_second": sum(rates) if len(rates) == len(requests) else None,
    }
