"""What `serve` prints when a server is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_zoo.cli.render.ready import curl_line, print_ready


def test_a_new_key_is_said_to_be_in_its_file_until_the_server_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, url = tmp_path / "1-2.key", "http://127.0.0.1:30000/v1"
    file.write_text("oscar-zoo-secret\n")
    facts = {
        "model_id": "m",
        "sglang": "0.5",
        "device": "cpu",
        "tensor_parallel": 1,
        "ranks": 1,
        "artifact": "m:t",
        "digest": "sha256:0",
        "level": "numeric",
        "code_bits": "2",
        "bits_per_element": 2.5,
        "clip": {"k": 1.0, "v": 1.0},
        "windows": {"sink": 1, "recent": 1},
        "bf16_capacity_tokens": None,
        "capacity_tokens": 1,
        "max_running_requests": 1,
        "drafts": None,
        "url": url,
        "seconds": 1.0,
        "curl": curl_line(url, "m", key_file=str(file)),
        "key_file": str(file),
    }
    print_ready(facts, stop="Ctrl-C", new_key=True)
    *_, attempt, key, variable = capsys.readouterr().out.splitlines()
    assert attempt.startswith("Try ") and str(file) in attempt
    assert key.split(maxsplit=1) == [
        "Key",
        "in that file until the server ends; oscar-zoo chat finds it there",
    ]
    assert variable == "OPENAI_API_KEY=oscar-zoo-secret"
