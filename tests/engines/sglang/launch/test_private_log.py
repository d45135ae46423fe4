"""The log of a server."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch.private_log import Redactor, open_private, redacted_log

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


def test_without_secrets_everything_is_written_at_once() -> None:
    assert Redactor(()).feed(b"abc") == b"abc"


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
