"""Phases of a start, from the lines that the supported releases of SGLang write."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch.phases import FIRST, PhaseReader

TIME = "[2026-05-20 10:00:00"
ON_A_GPU = {
    "0.5.17": (
        (
            f"{TIME}] server_args=ServerArgs(model_path='Qwen/Qwen3-8B',"
            " tokenizer_path='Qwen/Qwen3-8B')"
        ),
        f"{TIME} TP0] Init torch distributed begin.",
        f"{TIME} TP0] Load weight begin. avail mem=78.62 GB",
        f"{TIME} TP0] Load weight end. elapsed=2.10 s, type=Qwen3ForCausalLM, avail mem=63.14 GB",
        f"{TIME} TP0] Memory pool end. avail mem=8.41 GB",
        f"{TIME} TP0] INT2 KV cache: compiling kernels",
        f"{TIME} TP0] INT2 KV cache: kernels ready after 21.4 s, 0.0 s of waiting",
        f"{TIME} TP0] Capture target decode CUDA graph begin. backend=full, num_tokens=64",
        f"{TIME} TP0] max_total_num_tokens=2400000, chunked_prefill_size=8192",
        f"{TIME}] INFO:     Application startup complete.",
    ),
    "0.5.21 and 0.5.23": (
        f"{TIME}] server_args={{'model_path': 'Qwen/Qwen3-8B', 'tokenizer_path': 'Qwen/Qwen3-8B'}}",
        f"{TIME}] Init parallel begin.",
        f"{TIME}] Load weight begin. avail mem=78.62 GB",
        f"{TIME}] Load weight end. elapsed=2.10 s, type=Qwen3ForCausalLM, avail mem=63.14 GB",
        f"{TIME}] Memory pool end. avail mem=8.41 GB",
        f"{TIME}] INT2 KV cache: compiling kernels",
        f"{TIME}] INT2 KV cache: kernels ready after 21.4 s, 0.0 s of waiting",
        f"{TIME}] Capture target decode CUDA graph begin. backend=full, num_tokens=64",
        f"{TIME}] max_total_num_tokens=2400000, chunked_prefill_size=8192",
        f"{TIME}] INFO:     Application startup complete.",
    ),
}
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


@pytest.mark.parametrize("release", ON_A_GPU)
def test_every_line_opens_its_phase(tmp_path: Path, release: str) -> None:
    log, noise = tmp_path / "log", "Multi-thread loading shards:  50% Completed | 1/2\n"
    reader = PhaseReader(log)
    seen = [reader.current()]
    for line in ON_A_GPU[release]:
        with log.open("a") as stream:
            stream.write(line + "\n" + noise)
        seen.append(reader.current())
    assert seen == [FIRST, *EXPECTED]


def test_a_server_on_a_cpu_compiles_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [line for line in ON_A_GPU["0.5.17"] if "kernels" not in line and "graph" not in line]
    reader, seen = PhaseReader(log), []
    for line in lines:
        with log.open("a") as stream:
            stream.write(line + "\n")
        seen.append(reader.current())
    assert "preparing to run" in seen
    assert not {"compiling kernels", "capturing CUDA graphs"} & set(seen)


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
