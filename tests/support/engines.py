"""SGLang Engines for tests: every job once, in processes that are forked from one that imported
SGLang."""

import functools
import importlib.util
import json
import os
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from sglang_forks import shared
from tiny_artifacts import K_NAME, V_NAME

from oscar_zoo.engines.sglang.compat.releases import TESTED

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKOUT = (REPOSITORY, REPOSITORY / "kernels")
"""Packages under test, wherever the installed ones are."""
MODEL = REPOSITORY / "examples" / "models" / "tiny-qwen3-hard"
RELEASES = TESTED
"""Releases of SGLang that the plugin is tested with; one of them is installed, the others lie
beside it."""
INSTALLED = version("sglang") if importlib.util.find_spec("sglang") else ""
CHUNK = 64
ENGINE = {
    "model_path": str(MODEL),
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 6144,
    "max_running_requests": 8,
    "chunked_prefill_size": CHUNK,
    "disable_cuda_graph": True,
    "watchdog_timeout": 3600,
    "sleep_on_idle": True,  # else a scheduler without requests asks for some all the time
    "log_level": "info",
}
ATTEMPTS = 3
"""How often a job is started that lost its port."""
PORT_TAKEN = re.compile("EADDRINUSE|Port is already in use")
needs_sglang = pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: ours without anything that steers SGLang, the plugin or Python.

    SGLang would compile small functions with torch in every process, which takes longer than most
    jobs. Servers that are started as users do so (see `forked_commands`) compile them. It would
    move rows of a cache with a Triton kernel of its own, and the interpreter of that took a fifth
    of the time of jobs with drafts.
    """
    from oscar_zoo.engines.sglang.launch.plan import cpu_site_dir

    dropped = ("SGLANG_", "OSCAR_", "INT2_TEST_", "PYTHON", "TRITON_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(map(str, (cpu_site_dir(), *CHECKOUT))),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
        **extra,
    }


def folder_of(release: str) -> Path | None:
    """Where a release of SGLang lies that goes in front of the installed one; `None` for the
    installed one itself.

    The Makefile puts the others beside the virtual environment's packages. A test that asks for one
    that is not there is skipped.
    """
    if release == INSTALLED:
        return None
    folder = Path(sys.prefix) / f"sglang-{release}"
    if not (folder / "sglang").is_dir():
        pytest.skip(f"no SGLang {release} in {folder}; `make install` puts it there")
    return folder


class Engines:
    """Jobs by name, for one release of SGLang. All are queued at once and run in order; `result`
    waits for one.

    Every job runs in a fork of a process that imported SGLang (`sglang_forks`), and the workers of
    SGLang are forked too, so an Engine is up in a second. A job with `spawn` gets its workers as
    users do: fresh processes that load the plugin themselves.
    """

    def __init__(self, folder: Path, release: str | None = None) -> None:
        self.folder = folder
        self.release = release or INSTALLED
        front = folder_of(release) if release else None
        self._forks = shared(front) if front else shared()
        self._pool = ThreadPoolExecutor(1)
        self._jobs: dict[str, Future[dict[str, Any]]] = {}

    def start(
        self, name: str, *, env: dict[str, str], job: dict[str, Any], spawn: bool = False
    ) -> None:
        job = {**job, "engine": {**ENGINE, **job.get("engine", {})}}
        job["refused"] = [
            {**one, "engine": {**ENGINE, **one["engine"]}} for one in job.get("refused", ())
        ]
        (self.folder / f"{name}.job").write_text(json.dumps(job))
        self._jobs[name] = self._pool.submit(self._run, name, env, spawn)

    def result(self, name: str) -> dict[str, Any]:
        """What the child saved; its log goes to the failure message."""
        return self._jobs[name].result()

    def log(self, name: str) -> str:
        self.result(name)
        return (self.folder / f"{name}.log").read_text()

    def call(self, function: str, **given: Any) -> Any:
        """What `MODULE:NAME` writes to the file that it is told by `out`, beside the Engines."""
        out, log = self.folder / "call.out", self.folder / "call.log"
        code = self._forks.call(function, self.folder, log, out=str(out), **given)
        assert code == 0, log.read_text()[-4000:]
        return json.loads(out.read_text())

    def close(self) -> None:
        """Drop jobs that did not start, and end the processes of the one that runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._forks.kill()
        self._pool.shutdown()

    def _run(self, name: str, env: dict[str, str], spawn: bool) -> dict[str, Any]:
        out, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        for _ in range(ATTEMPTS):
            log.unlink(missing_ok=True)
            code = self._forks.call(
                "engine_child:forked", self.folder, log, env, name=name, spawn=spawn
            )
            if out.exists():
                result: dict[str, Any] = json.loads(out.read_text())
                return result
            if not self.lost_a_port(log):
                break
        raise AssertionError(f"engine {name} ended with {code}:\n{log.read_text()[-4000:]}")

    def lost_a_port(self, log: Path) -> bool:
        """Whether the job that wrote `log` ended because another process took the port that SGLang
        had picked for its ranks."""
        return PORT_TAKEN.search(log.read_text(errors="replace")) is not None


def report_of(run: dict[str, Any]) -> dict[str, Any]:
    (report,) = run["reports"]
    return dict(report)


def assert_every_hook_ran(report: dict[str, Any], *, tail: bool) -> None:
    """Every hook of a worker with an INT2 cache ran; `tail` says whether hits leave the window to
    prefill."""
    wanted = {
        "rendezvous",
        "kv_dtype",
        "slot_bytes",
        "budget",
        "rows",
        "pool",
        "alloc",
        "match",
        "admit",
        "release",
    }
    assert {*report["fired"]} - {"flush"} == (wanted | {"tail"} if tail else wanted)


def tokenizer() -> Callable[[str], list[int]]:
    """The tokenizer of the example model, without special tokens."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


def text_tokens() -> list[int]:
    return [*_text_tokens()]


@functools.cache
def _text_tokens() -> tuple[int, ...]:
    text = (REPOSITORY / "examples" / "text" / "validation.txt").read_text()
    return tuple(tokenizer()(text[:60000]))


def recall_prompts() -> list[list[int]]:
    """Facts, text after them, and a question for one of the facts: as passkeys, as a table, and
    text alone."""
    encode, ids = tokenizer(), text_tokens()
    names = ["Sala", "Roso", "Poba", "Vevo", "Bero", "Lima", "Kado", "Nole"]
    passkeys = "".join(
        f"\nThe access code of {name} is {391746 + 57 * i}.\n" for i, name in enumerate(names[:4])
    )
    question = "\nQuestion: What is the access code of Roso?\nAnswer: "
    table = "".join(f"\n {name} = {2386 + 411 * i}" for i, name in enumerate(names))
    return [
        [*ids[:40], *encode(passkeys), *ids[3000:3200], *encode(question)],
        [*ids[900:990], *encode(table), *ids[7000:7090], *encode("\n Vevo = ")],
        ids[5000:5333],
    ]


def plumbing_groups(tokens: list[int]) -> list[dict[str, Any]]:
    """Shared prefixes, the same prompts again, second turns, one of them of a short prompt, a
    shortened prompt, and ten requests at once."""
    rng = random.Random(0)

    def piece(number: int) -> list[int]:
        start = rng.randrange(len(tokens) - number)
        return tokens[start : start + number]

    a, c = piece(150), piece(9)
    b = a[:100] + piece(40)
    return [
        {"name": "first", "prompts": [a, b, c], "new": 24},
        {"name": "again", "prompts": [a, b, c], "new": 24},
        {
            "name": "turn2",
            "prompts": [{"of": ["first", 0], "append": piece(5)}, b[:120], [*c, 7]],
            "new": 24,
        },
        {"name": "longer", "prompts": [{"of": ["first", 2], "append": piece(30)}], "new": 24},
        {"name": "many", "prompts": [piece(rng.randrange(5, 200)) for _ in range(10)], "new": 24},
    ]


def window_groups(tokens: list[int], sink: int) -> list[dict[str, Any]]:
    """Prompts without a common token, around the size of the windows; then two that share exactly
    the first `sink`."""
    rng, used = random.Random(1), set[int]()

    def piece(number: int) -> list[int]:
        start = next(
            i
            for i in iter(lambda: rng.randrange(len(tokens) - number), -1)
            if tokens[i] not in used
        )
        used.add(tokens[start])
        return tokens[start : start + number]

    lengths = (150, 9, sink - 1, sink, sink + 1, 100)
    first = piece(120)
    return [
        {"name": "alone", "prompts": [piece(length) for length in lengths], "new": 40},
        {"name": "donor", "prompts": [first], "new": 24},
        {
            "name": "sharing",
            "prompts": [first[:sink] + piece(100), first[:sink] + piece(20)],
            "new": 24,
        },
    ]


def eviction_groups(tokens: list[int], sink: int) -> list[dict[str, Any]]:
    """Questions for facts among the first `sink` tokens: with their block, after three others
    pushed it out, and while another request with the same first tokens is halfway through them.
    `sink` is 96 and a chunk 64 tokens."""
    encode, names = tokenizer(), {"Sala": 7386, "Roso": 1797, "Poba": 9208, "Vevo": 3619}
    table = [token for name, number in names.items() for token in encode(f"\n {name} = {number}")]
    text = [*tokens[900:964], *table, *tokens[7000:7050]]
    asks = {name: [*text, *encode(f"\n {name} = ")] for name in names}
    return [
        {"name": "made", "prompts": [asks["Vevo"]], "new": 8},
        {"name": "shared", "prompts": [asks["Sala"], asks["Roso"]], "new": 8},
        {
            "name": "others",
            "prompts": [tokens[at : at + 100] for at in (2000, 3000, 4000)],
            "new": 24,
        },
        {"name": "gone", "prompts": [text[: sink + 1], asks["Poba"], asks["Roso"]], "new": 8},
    ]


VARIABLES = {
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
    "SGLANG_OSCAR_K_CLIP_RATIO": "0.96",
    "SGLANG_OSCAR_V_CLIP_RATIO": "0.92",
    "SGLANG_OSCAR_ABSORB_V_ROTATION": "1",
    "SGLANG_MIXED_KV_PREFIX_TOKENS": "64",
    "SGLANG_MIXED_KV_RECENT_TOKENS": "256",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": "8",
    "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
    "SGLANG_MIXED_KV_SCALE_DTYPE": "float32",
    "SGLANG_LLOYD_MAX": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HADAMARD_ORDER": "64",
}
NOTED = (
    "HADAMARD_ORDER",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS",
    "SGLANG_MIXED_KV_SCALE_DTYPE",
    "SGLANG_OSCAR_ABSORB_V_ROTATION",
)
"""Variables that mean nothing here, or something slightly else: one note each."""
FLAGS = (
    "--kv-cache-dtype",
    "int2",
    "--kv-cache-quant-group-size",
    "64",
    "--prefill-attention-backend",
    "fa3",
    "--decode-attention-backend",
    "triton",
    "--mem-fraction-static",
    "0.5",
    "--max-running-requests",
    "8",
    "--enable-cache-report",
    "--disable-radix-cache",
    "--disable-custom-all-reduce",
    "--trust-remote-code",
)


def card(model: Path, pair: Path, *more: str, **variables: str) -> dict[str, Any]:
    """A case of `engine_calls`, for the rotation files in `pair`; `more` flags come last."""
    files = {
        "SGLANG_OSCAR_K_ROTATION_PATH": str(pair / K_NAME),
        "SGLANG_OSCAR_V_ROTATION_PATH": str(pair / V_NAME),
    }
    argv = ["--model-path", str(model), *FLAGS, "--device", "cpu", *more]
    return {"argv": argv, "env": {**VARIABLES, **files, **variables}}
