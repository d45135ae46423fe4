"""How long a server takes until it is ready: stock SGLang and ours, with empty caches of compiled
kernels and with those of the start before.

    python contrib/benchmarks/start_speed.py [--device cpu] [--rounds 3] [--cold | --filled]

The model has the shape of Qwen3-8B but for its hidden size, 36 layers with random weights of 0.5 GB
(4 layers on a CPU), so there is less time than usual in which kernels can be compiled while weights
are loaded. Stock SGLang starts with its usual cache and without our plugin. Ours is `oscar-zoo
serve`, from its first instruction on. One start of each is not counted: it fills the disk cache of
the system and the cache of FlashInfer. With `--cold` there is none, and a first start has no cache
at all; with `--filled` both are full already. `--drafts` starts servers with drafts of n-grams.

A row is the second in which a phase began, as the log tells, then the first answer of `/health` and
of a completion, and what the plugin says of its kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from oscar_zoo.engines.sglang.launch.plan import child_environment, free_port
from oscar_zoo.engines.sglang.launch.server_log import PHASES
from oscar_zoo.engines.sglang.launch.starting import BACKENDS, NO_PLUGIN
from oscar_zoo.engines.sglang.sizing import device_flags, device_switches
from oscar_zoo.evaluate.bench import sides
from oscar_zoo.models.config_file import geometry_of_folder

TOKENIZER = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
PROGRAM = (sys.executable, "-c", "from oscar_zoo.cli.main import main; main()")
DRAFTS = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=8")
LONGEST = 900.0
PAUSE = 0.02
TOLD = re.compile(r"INT2 KV cache: (.*kernels.*)")


@dataclass
class Start:
    """Seconds of one start, by phase, and what the plugin told."""

    seconds: dict[str, float] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def main() -> None:
    """Start servers one after the other, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--filled", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--engine-flags", default="", help="more flags for SGLang, as one string")
    given = parser.parse_args()
    found: dict[str, list[Start]] = {}
    with tempfile.TemporaryDirectory(prefix="start-speed-") as name:
        work = Path(name)
        write_model(work / "model", layers=4 if given.device == "cpu" else 36)
        geometry = geometry_of_folder(work / "model", "random")
        sides.write_rotations(work / "rotation", geometry)
        skipped = not (given.cold or given.filled)
        rounds = range(given.rounds + skipped)
        for number in rounds:
            counted = not skipped or number > 0
            for side in ("stock", "ours"):
                home = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=work))
                for which in ("first", "second") if counted else ("first",):
                    start = run(side, work, home, given)
                    told = {what: round(at, 1) for what, at in start.seconds.items()}
                    print(side, which, told, file=sys.stderr, flush=True)
                    if counted:
                        found.setdefault(f"{side}, {which}", []).append(start)
                shutil.rmtree(home)
    show(found)


def run(side: str, work: Path, home: Path, given: argparse.Namespace) -> Start:
    """One start, whose caches are in the folder `home`."""
    port, log = free_port(), home / "server.log"
    log.unlink(missing_ok=True)
    own = {"XDG_CACHE_HOME": str(home / "cache"), "OSCAR_ZOO_STATE": str(home / "state")}
    if given.cold:
        own["HOME"] = str(home)
    more = shlex.split(given.engine_flags)
    extra = [*(DRAFTS if given.drafts else ()), *more, f"--port={port}"]
    flags = [f"{flag}={value}" for flag, value in device_flags("cpu").items()]
    on_cpu = [*flags, *device_switches("cpu")] if given.device == "cpu" else []
    if side == "stock":
        command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={work / 'model'}"]
        command += [*on_cpu, f"--attention-backend={BACKENDS[given.device]}", *extra]
        env = child_environment(os.environ, device=given.device, kernels=home / "kernels")
        env |= own | {"SGLANG_PLUGINS": NO_PLUGIN}
    else:
        command = [*PROGRAM, "serve", str(work / "rotation"), "--model", str(work / "model")]
        command += ["--port", str(port), "--device", given.device, "--", *extra[:-1]]
        env = {**os.environ, **own}
        log = home / f"state/logs/serve-{port}.log"
    with (home / "output").open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=env,
            stdout=output if side == "ours" else log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _watch(process, began, log, port, home / "output")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _watch(
    process: subprocess.Popen[bytes], began: float, log: Path, port: int, output: Path
) -> Start:
    start = Start()

    def passed(what: str) -> None:
        start.seconds.setdefault(what, time.monotonic() - began)

    while "ready" not in start.seconds:
        if process.poll() is not None or time.monotonic() - began > LONGEST:
            words = (file.read_text(errors="replace") for file in (output, log) if file.exists())
            raise SystemExit("\n".join(words)[-4000:])
        if log.exists():
            passed("SGLang is started")
            for phase in _phases(log):
                passed(phase)
        if _ask(port, "/health") is not None:
            passed("ready")
        time.sleep(PAUSE)
    body = {"model": "default", "prompt": "Hello", "max_tokens": 8}
    models = json.loads(_ask(port, "/v1/models") or b"{}")
    body["model"] = models["data"][0]["id"]
    if _ask(port, "/v1/completions", json.dumps(body).encode()) is None:
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    passed("first answer")
    start.told = TOLD.findall(log.read_text(errors="replace"))
    return start


def _phases(log: Path) -> Iterator[str]:
    text = log.read_text(errors="replace")
    for number, (pattern, phase) in enumerate(PHASES):
        if re.search(rf"^(\[[^\]\n]*\] )?{pattern}", text, re.MULTILINE):
            yield f"{number + 1} {phase}"


def _ask(port: int, path: str, body: bytes | None = None) -> bytes | None:
    address, headers = f"http://127.0.0.1:{port}{path}", {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(address, body, headers)
        with urllib.request.urlopen(request, timeout=600 if body else 5) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError):
        return None


def write_model(folder: Path, *, layers: int) -> None:
    """Write a Qwen3 with 32 query heads and 8 KV heads of 128, random weights in bfloat16, and a
    context of 32,768 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


def show(found: dict[str, list[Start]]) -> None:
    """Print medians in seconds, ours less stock, and what the plugin said in the last round."""
    rows = list(
        dict.fromkeys(what for starts in found.values() for x in starts for what in x.seconds)
    )
    names = [f"{side}, {which}" for which in ("first", "second") for side in ("stock", "ours")]

    def median(name: str, what: str) -> float | None:
        seen = [x.seconds[what] for x in found[name] if what in x.seconds]
        return statistics.median(seen) if seen else None

    print("| second in which it began | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(names))
    for what in sorted(rows, key=lambda what: min(median(n, what) or LONGEST for n in names)):
        cells = [median(name, what) for name in names]
        print(f"| {what} | " + " | ".join("" if x is None else f"{x:.1f}" for x in cells) + " |")
    for which in ("first", "second"):
        for what in ("ready", "first answer"):
            ours, stock = (median(f"{side}, {which}", what) or 0 for side in ("ours", "stock"))
            print(f"{which} start, {what}: ours less stock {ours - stock:+.1f} s")
    for name, starts in found.items():
        for line in starts[-1].told:
            print(f"{name}: {line}")


if __name__ == "__main__":
    main()
