"""The whole product on the example model: compute, verify, publish, pull, measure, serve. Run it
with `make demo`.

Every step is an ordinary command line, shown before it runs. State goes to one folder, nothing else
is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI = Path(sys.executable).parent / "oscar-zoo"
MODEL = "examples/models/tiny-qwen3-hard"
NAME = "tiny-qwen3-hard"
PASSKEY = "528364"
READY_SECONDS = 300

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
        "--work", type=Path, default=ROOT / ".demo", help="folder for all state; emptied first"
    )
    work = parser.parse_args().work.absolute()
    started = time.monotonic()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(ROOT)
    os.environ.update(
        {
            f"OSCAR_ZOO_{name.upper()}": str(work / name)
            for name in ("cache", "data", "state", "config")
        }
    )
    rotation = os.path.relpath(work / "rotation")
    hub = f"file:{os.path.relpath(work / 'zoo')}"
    run(
        "compute",
        MODEL,
        "--calib-data",
        "examples/text/calibration.txt",
        "--output-dir",
        rotation,
        "-q",
    )
    run("verify", rotation)
    run("publish", rotation, "--hub", hub, "--create", "-q")
    run("pull", NAME, "--hub", hub, "--no-lock", "-q")
    measured = run(
        "eval",
        NAME,
        "--model",
        MODEL,
        "--data",
        "examples/text/validation.txt",
        "--json",
        show=False,
    )
    answer = ask_served_model(passkey_prompt())
    print_table(json.loads(measured))
    print(
        "\nThe running server was asked for a code near the start of a prompt of"
        f" {answer['tokens']} tokens:"
    )
    print(f"  expected {PASSKEY!r}, answered {answer['text']!r}")
    print(
        f"\nAll steps done in {time.monotonic() - started:.0f} s. Rotation: {rotation}, hub: {hub}"
    )
    return 0


def run(*arguments: str, show: bool = True) -> str:
    """Run one command line of the tool and return what it printed; a failure ends the demo with its
    exit code."""
    print(f"\n$ oscar-zoo {' '.join(arguments)}", flush=True)
    done = subprocess.run([CLI, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if show or done.returncode:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def passkey_prompt() -> str:
    """A text with a code near its start and a question at its end, long enough for the code to be
    read from INT2."""
    text = (ROOT / "examples/text/validation.txt").read_text("utf-8").split("<|endoftext|>")
    filler = " ".join(text[1].split())
    return (
        f"{filler[:900]}\nThe access code of Bemika is {PASSKEY}.\n{filler[900:3400]}"
        "\nQuestion: What is the access code of Bemika?\nAnswer: "
    )


def ask_served_model(prompt: str) -> dict[str, Any]:
    """Start the server, ask over the OpenAI-compatible API, stop it; the answer and the prompt's
    length in tokens."""
    port = free_port()
    arguments = ["serve", NAME, "--model", MODEL, "--port", str(port), "--json"]
    print(f"\n$ oscar-zoo {' '.join(arguments)} &", flush=True)
    server = subprocess.Popen([CLI, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        ready = read_ready(server)
        print(
            f"Ready at {ready['url']} after {ready['seconds']:.0f} s, {ready['artifact']}"
            f" {ready['digest'][:19]}..."
        )
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0}
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
