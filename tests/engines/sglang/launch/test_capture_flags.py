"""The flags of a user that an engine takes when it calibrates."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import MODEL, RELEASES, Engines, needs_sglang

from oscar_zoo.engines.sglang.launch.capture_flags import REFUSED_FLAGS, read_flags
from oscar_zoo.errors import UsageError


@pytest.mark.parametrize("flag", sorted(REFUSED_FLAGS))
def test_what_the_capture_decides_is_refused_in_every_spelling(flag: str) -> None:
    for spelling in (flag, f"{flag}=x", flag.replace("-", "_").replace("__", "--", 1), flag[:-1]):
        with pytest.raises(UsageError, match="is not allowed after --") as caught:
            read_flags(["--attention-backend=triton", spelling])
        assert "\n" not in caught.value.message and caught.value.hint == "oscar-zoo compute --help"


@pytest.mark.parametrize(
    "word",
    ["--oscar-sink-size=4", "--speculative-algorithm=EAGLE", "--trust-remote-code", "--port"],
)
def test_families_and_what_no_engine_of_ours_takes(word: str) -> None:
    with pytest.raises(UsageError, match="is not allowed after --"):
        read_flags([word])


def test_others_are_taken_as_they_are() -> None:
    words = ("--attention-backend", "flashinfer", "--mem-fraction-static=0.8", "--page-size=16")
    assert read_flags(words).words == words


@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_reads_the_command_line(tmp_path: Path, release: str) -> None:
    """An abbreviation that is refused must not be the whole name of another flag."""
    engines = Engines(tmp_path, release)
    words = ["--attention-backend=flashinfer", "--mem-fraction-static", "0.75"]
    found = engines.call("server_args_child:capture", model=str(MODEL), words=words)
    engines.close()
    assert found["args"] == {
        "model_path": str(MODEL),
        "tp_size": 2,
        "device": "cpu",
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": 612,
        "attention_backend": "flashinfer",
        "mem_fraction_static": 0.75,
    }
    assert found["refused"] == found["meant"] and found["unknown"] == []
