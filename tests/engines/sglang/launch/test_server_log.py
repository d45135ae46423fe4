"""The log of a server."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch.server_log import (
    FIRST,
    PhaseReader,
    Redactor,
    open_private,
    redacted_log,
)

SECRETS = ("canary-with-'quotes'-and-\"more\"-/+", "canary-of-administration")
PROGRAM = """
import json, sys, time
for secret in sys.argv[1:]:
    sys.stdout.write(f"ServerArgs(api_key={secret!r}, {json.dumps(secret)})")
    sys.stdout.flush()
    for letter in secret:  # in as many writes
        sys.stderr.write(letter); sys.stderr.flush()
sys.stdout.write("can")  # the beginning of a secret, which is none
"""


def test_a_secret_is_removed_wherever_the_stream_is_cut() -> None:
    text = f"a {SECRETS[0]} b{SECRETS[1]}{SECRETS[1]} canary-with-nothing canary".encode()
    wanted = b"a *** b****** canary-with-nothing canary"
    for seed in range(300):
        choice, redactor, found, at = random.Random(seed), Redactor(SECRETS), b"", 0
        while at < len(text):
            step = choice.randint(1, 12)
            found += redactor.feed(text[at : at + step])
            at += step
        assert found + redactor.rest() == wanted


def test_what_a_child_says_is_in_a_private_file_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an earlier log")
    log.chmod(0o644)
    with redacted_log(log, SECRETS) as (stream, _):
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *SECRETS], stdout=stream, stderr=stream, check=True
        )
    said = log.read_text()
    assert said.count("***") == 6 and said.endswith("can") and "ServerArgs" in said
    assert "canary" not in said and log.stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        open_private(tmp_path / "log")
    assert not (tmp_path / "other").exists()


TIME = "[2026-05-20 10:00:00"
ARGUMENTS = {
    " TP0": "server_args=ServerArgs(model_path='Qwen/Qwen3-8B')",  # SGLang 0.5.17
    "": "server_args={'model_path': 'Qwen/Qwen3-8B'}",  # 0.5.21 and 0.5.23
}
CONNECTS = {" TP0": "Init torch distributed begin.", "": "Init parallel begin."}
LINES = (
    "Load weight begin. avail mem=78.62 GB",
    "Load weight end. elapsed=2.10 s, type=Qwen3ForCausalLM, avail mem=63.14 GB",
    "Memory pool end. avail mem=8.41 GB",
    "INT2 KV cache: compiling kernels",
    "INT2 KV cache: kernels ready after 21.4 s, 0.0 s of waiting",
    "Capture target decode CUDA graph begin. backend=full, num_tokens=64",
    "max_total_num_tokens=2400000, chunked_prefill_size=8192",
)
EXPECTED = [
    "starting the workers",
    "connecting the workers",
    "loading weights",
    "allocating the cache",
    "preparing to run",
    "compiling kernels",
    "preparing to run",
    "capturing CUDA graphs",
    "starting the HTTP server",
    "warming up",
]


@pytest.mark.parametrize("rank", ARGUMENTS)
def test_every_line_opens_its_phase(tmp_path: Path, rank: str) -> None:
    log, noise = tmp_path / "log", "Multi-thread loading shards:  50% Completed | 1/2\n"
    reader = PhaseReader(log)
    seen = [reader.current()]
    lines = [f"{TIME}] {ARGUMENTS[rank]}"]
    lines += [f"{TIME}{rank}] {line}" for line in (CONNECTS[rank], *LINES)]
    for line in [*lines, f"{TIME}] INFO:     Application startup complete."]:
        with log.open("a") as stream:
            stream.write(line + "\n" + noise)
        seen.append(reader.current())
    assert seen == [FIRST, *EXPECTED]


def test_a_slower_worker_does_not_turn_it_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{TIME} TP0] Load weight end. elapsed=2 s\n{TIME} TP1] Load weight begin.\n")
    assert PhaseReader(log).current() == "allocating the cache"


def test_half_a_line_waits_for_the_other_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader = PhaseReader(log)
    log.write_bytes(f"{TIME}] Load wei".encode())
    assert reader.current() == FIRST
    with log.open("a") as stream:
        stream.write("ght begin. \ufffd\n")
    assert reader.current() == "loading weights"
