"""The whole product on the example model: compute, verify, publish, pull, measure, serve. Run it
with `make demo`.

Every step is an ordinary command line, shown before it runs. All of them run in one folder, which
has its own lock, hub and cache; nothing else is read or touched. What an earlier run computed and
measured there from the same model, text and code is used again, and an interrupted computation
continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI = Path(sys.executable).parent / "oscar-zoo"
MODEL = ROOT / "examples/models/tiny-qwen3-hard"
CALIBRATION = ROOT / "examples/text/calibration.txt"
VALIDATION = ROOT / "examples/text/validation.txt"
NAME = "tiny-qwen3-hard"
PASSKEY = "528364"
READY_SECONDS = 300
EMPTY_LOCK = '{"schema": "oscar-zoo.lock/1", "artifacts": []}\n'
FLOAT32 = ("--dtype", "float32")
"""Many processors multiply bfloat16 at a fifth of the speed."""
QUICK = (("--fast", "--no-tune", *FLOAT32), ("--windows", "2", "--answers", "20", *FLOAT32))
"""Options of `compute` and of `eval` with `--quick`."""

ROWS = {
    "bf16": "BF16",
    "int2": "INT2",
    "int2-hadamard": "Hadamard INT2",
    "int2-hadamard-clip": "Hadamard INT2, clipped",
    "artifact": "INT2 as computed",
}


def main() -> int:
    """Run every step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / ".demo",
        help="folder for all state; only what was computed from the same inputs stays in it",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="choose by errors of attention alone, and measure on less text and fewer questions",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return every_step(given.work.absolute(), quick=given.quick)
    except KeyboardInterrupt:
        print("\nInterrupted; the next run continues with what was computed.", file=sys.stderr)
        return 130


def every_step(work: Path, *, quick: bool) -> int:
    """Run all steps in the folder `work`; returns the exit code."""
    started, here = time.monotonic(), Path.cwd()
    compute_options, eval_options = QUICK if quick else ((), ())
    prepare(work, compute_options)
    print(f"$ cd {os.path.relpath(work)}")
    os.chdir(work)
    os.environ.update(
        {
            f"OSCAR_ZOO_{name.upper()}": str(work / name)
            for name in ("cache", "data", "state", "config")
        }
    )
    compute(compute_options)
    run("verify", "./rotation")
    unmeasured = ("--unmeasured",) if quick else ()  # --fast measures no perplexity
    run("publish", "./rotation", "--hub", "file:./zoo", "--create", "-q", *unmeasured)
    run("pull", NAME, "--hub", "file:./zoo", "-q")
    measured = measure(eval_options)
    answer = ask_served_model(passkey_prompt())
    print_table(measured)
    print(
        "\nThe running server was asked for a code near the start of a prompt of"
        f" {answer['tokens']} tokens:"
    )
    print(f"  expected {PASSKEY!r}, answered {answer['text']!r}")
    print(
        f"\nAll steps done in {time.monotonic() - started:.0f} s. Rotation: {work / 'rotation'},"
        f" hub: file:{work / 'zoo'}"
    )
    print_next_steps(work, here)
    return 0


def print_next_steps(work: Path, here: Path) -> None:
    """Say what to do next, in commands that can be copied into the shell in the folder `here`."""

    def path(place: Path) -> str:
        seen = os.path.relpath(place, here)
        return shlex.quote(seen if seen.startswith("..") else f"./{seen}")

    tool = path(CLI)
    print("\nNext:")
    for what, step in (
        ("read the report", f"open {path(work / 'rotation.report.html')} in a browser"),
        ("serve it", f"{tool} serve {path(work / 'rotation')} --model {path(MODEL)}"),
        ("talk to it", f"{tool} chat    (in another terminal)"),
        ("your own model", f"{tool} compute ./MODEL --calib-data ./prompts.jsonl"),
        ("what others made", f"{tool} list"),
    ):
        print(f"  {what:<18}{step}")


def prepare(work: Path, options: Sequence[str] = ()) -> None:
    """Empty the folder `work` but for what was computed from the inputs of now with the same
    `options`; an empty lock in it keeps the lock of a project around it out."""
    work.mkdir(parents=True, exist_ok=True)
    inputs, now = work / "rotation.inputs", " ".join([digest_of_inputs(), *options])
    same = inputs.is_file() and inputs.read_text("utf-8") == now
    for path in work.iterdir():
        if same and path.name.split(".")[0] == "rotation":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    inputs.write_text(now, "utf-8")
    (work / "oscar-zoo.lock").write_text(EMPTY_LOCK, "utf-8")


def digest_of_inputs() -> str:
    """A digest of everything that a computation depends on in this checkout: model, text, code."""
    digest = hashlib.sha256()
    code = (ROOT / "oscar_zoo").rglob("*.py")
    for path in (*sorted(MODEL.iterdir()), CALIBRATION, *sorted(code)):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compute(options: Sequence[str] = ()) -> None:
    """Compute `./rotation` with `options`, unless it is there; continue a computation that was
    interrupted."""
    if Path("rotation/oscar.json").is_file():
        print(
            "\n./rotation was computed by an earlier run from the same model, text and code. To"
            " compute it again, remove the folder."
        )
        return
    resume = ("--resume",) if any(Path("rotation.work").glob("*")) else ()
    data = os.path.relpath(CALIBRATION)
    output = ("--output-dir", "./rotation")
    run("compute", model(), "--calib-data", data, *output, *options, *resume)


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """What `eval` measures with `options`, unless an earlier run measured the same; see
    `digest_of_measurement`."""
    kept, inputs = Path("rotation.eval.json"), digest_of_measurement(options)
    with suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads(kept.read_bytes())
        if earlier["inputs"] == inputs:
            print(
                "\nThe rotation was measured by an earlier run with the same model, text, options"
                f" and code. To measure it again, remove {kept}."
            )
            return dict(earlier["report"])
    texts = ("--model", model(), "--data", os.path.relpath(VALIDATION))
    report = json.loads(run("eval", NAME, *texts, *options, "--json", show=False))
    kept.write_text(json.dumps({"inputs": inputs, "report": report}), "utf-8")
    return dict(report)


def digest_of_measurement(options: Sequence[str]) -> str:
    """A digest of everything that a measurement depends on: the inputs of the computation, the
    rotation, the text and the options."""
    digest = hashlib.sha256(" ".join([digest_of_inputs(), *options]).encode())
    for path in (VALIDATION, *sorted(Path("rotation").iterdir())):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def model() -> str:
    """The model's folder, seen from the current one."""
    return os.path.relpath(MODEL)


def run(*arguments: str, show: bool = True) -> str:
    """Run one command line of the tool and return what it printed; a failure ends the demo with its
    exit code."""
    print(f"\n$ oscar-zoo {' '.join(arguments)}", flush=True)
    child = subprocess.Popen([CLI, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = child.communicate()
    except KeyboardInterrupt:  # the terminal interrupts the command too: it ends by itself
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=30)
        child.kill()
        raise
    except SystemExit:  # SIGTERM reaches this process alone
        child.terminate()
        child.wait()
        raise
    if child.returncode == 130:
        raise KeyboardInterrupt
    if show or child.returncode:
        print(printed, end="", flush=True)
    if child.returncode:
        sys.exit(child.returncode)
    return printed


def passkey_prompt() -> str:
    """A text with a code near its start and a question at its end, long enough for the code to be
    read from INT2."""
    text = VALIDATION.read_text("utf-8").split("<|endoftext|>")
    filler = " ".join(text[1].split())
    return (
        f"{filler[:900]}\nThe access code of Bemika is {PASSKEY}.\n{filler[900:3400]}"
        "\nQuestion: What is the access code of Bemika?\nAnswer: "
    )


def ask_served_model(prompt: str) -> dict[str, Any]:
    """Start the server, ask over the OpenAI-compatible API, stop it; the answer and the prompt's
    length in tokens."""
    port = free_port()
    arguments = ["serve", NAME, "--model", model(), "--port", str(port), "--json"]
    print(f"\n$ oscar-zoo {' '.join(arguments)} &", flush=True)
    server = subprocess.Popen([CLI, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        ready = read_ready(server)
        print(
            f"Ready at {ready['url']} after {ready['seconds']:.0f} s, {ready['artifact']}"
            f" {ready['digest'][:19]}..."
        )
        body = {"model": model(), "prompt": prompt, "max_tokens": 6, "temperature": 0}
        request = urllib.request.Request(
            f"{ready['url']}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=READY_SECONDS) as response:
            reply = json.load(response)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    return {"text": reply["choices"][0]["text"], "tokens": reply["usage"]["prompt_tokens"]}


def read_ready(server: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object `serve --json` prints when the server answers."""
    assert server.stdout is not None
    text = ""
    for line in server.stdout:
        text += line
        if line.startswith("}"):
            break
    value = json.loads(text or "{}")
    if "url" not in value:
        sys.exit(f"the server did not start: {value.get('error', value)}")
    return dict(value)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_table(report: dict[str, Any]) -> None:
    """One line per cache."""
    print(f"\n{'CACHE':<24} {'BITS PER ELEMENT':>16} {'PERPLEXITY':>12} {'DIGITS RECALLED':>16}")
    for row in report["rows"]:
        name = ROWS.get(row["cache"], row["cache"])
        print(
            f"{name:<24} {row['bits_per_element']:>16.2f} {row['perplexity']:>12,.2f}"
            f" {row['recall']:>16.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
