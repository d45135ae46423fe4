"""FlashInfer's kernels are compiled beside a start, and never longer than the server lives."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from served_model import alive

from oscar_zoo.engines.sglang import compiling
from oscar_zoo.engines.sglang.compiling import Wanted
from oscar_zoo.models import hardware
from oscar_zoo.runtime import prefill

WANTED = Wanted(gpu=0, head_dims=(128, 128), dtype="bfloat16", capped=False)
COMMAND = [
    sys.executable, "-P", "-m", compiling.__name__, WANTED.model_dump_json(), str(os.getpid())
]  # fmt: skip
SERVER = f"""
import os, time
from oscar_zoo.engines.sglang import compiling
wanted = compiling.Wanted.model_validate_json({WANTED.model_dump_json()!r})
child = compiling.spawn(wanted)
"""
"""A server that has the modules compiled."""
LEAVE = """
with open(os.environ["BUILT"] + "/program", "w") as file:
    file.write(str(child.pid))
os._exit(0)
"""
"""What it does next when it is refused."""
WAITING_COMPILER = 'echo $$ > "$BUILT/pid.$$" && mv "$BUILT/pid.$$" "$BUILT/pid" && exec sleep 600'
STAND_IN = """
import os, subprocess, pathlib
class Module:
    is_aot = False
    def __init__(self, name):
        self.name, self.jit_library_path = name, pathlib.Path(os.environ["BUILT"]) / name
    def build(self, verbose):
        subprocess.run(["sh", "-c", os.environ["COMPILER"], "sh", str(self.jit_library_path)])
def gen_batch_prefill_module(backend, *args): return Module("batch")
def gen_single_prefill_module(backend, *args): return Module("single")
def gen_cascade_module(): return Module("merge")
"""
"""Modules of a FlashInfer whose compiler is a shell command."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which that FlashInfer is found."""
    package = tmp_path / "path" / "flashinfer"
    (package / "jit").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "utils.py").write_text("def determine_attention_backend(*args): return 'fa2'\n")
    (package / "jit" / "__init__.py").touch()
    (package / "jit" / "attention.py").write_text(STAND_IN)
    (package / "jit" / "cascade.py").write_text("from flashinfer.jit.attention import *\n")
    built = tmp_path / "built"
    built.mkdir()
    return {**os.environ, "PYTHONPATH": str(tmp_path / "path"), "BUILT": str(built)}


def run(environment: Mapping[str, str], compiler: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        COMMAND, env={**environment, "COMPILER": compiler}, capture_output=True, text=True
    )


def test_nothing_starts_for_heads_that_flashinfer_lacks() -> None:
    assert compiling.spawn(WANTED.model_copy(update={"head_dims": (96, 96)})) is None


def test_what_is_missing_is_compiled_once(environment: dict[str, str]) -> None:
    (Path(environment["BUILT"]) / "single").touch()
    first = run(environment, 'touch "$1"')
    assert first.returncode == 0, first.stderr
    assert "INT2 KV cache: 2 modules of FlashInfer were compiled ahead in " in first.stdout
    assert {x.name for x in Path(environment["BUILT"]).iterdir()} == {"batch", "single", "merge"}
    second = run(environment, "exit 1")
    assert second.returncode == 0 and second.stdout == ""


NINJA_SAYS = "\n".join(
    (
        "Ninja build failed. Ninja output:",
        "ninja: Entering directory `/cache'",
        "[1/2] /cuda/bin/nvcc -Werror " + 500 * "-isystem /include ",
        "FAILED: [code=1] batch.cuda.o",
        '/csrc/batch.cu(12): error: identifier "Params" is undefined',
        "ninja: build stopped: subcommand failed.",
    )
)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (NINJA_SAYS, '/csrc/batch.cu(12): error: identifier "Params" is undefined'),
        ("Killed\n" + 9 * "and so on\n", "Killed"),
        ("in " + 9999 * "x", "in " + 297 * "x"),
        ("", ""),
    ],
)
def test_a_failed_build_is_told_shortly(says: str, told: str, environment: dict[str, str]) -> None:
    attention = Path(environment["PYTHONPATH"]) / "flashinfer" / "jit" / "attention.py"
    fails = f"def build(self, verbose): raise RuntimeError({says!r})"
    attention.write_text(f"{STAND_IN}class Module(Module):\n    {fails}\n")
    done = run(environment, "true")
    assert done.returncode != 0
    line = f"FlashInfer's kernels are not compiled ahead (RuntimeError: {told})\n"
    assert done.stdout.partition("INT2 KV cache: ")[2] == line


@pytest.mark.parametrize(("free", "at_once"), [(63 << 30, 1), (64 << 30, 3)])
def test_all_modules_are_compiled_at_once_where_memory_is_enough(
    free: int, at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory that this process may take, in its control group, with file pages given back."""
    places, all_run = threading.Semaphore(at_once), threading.Barrier(at_once, timeout=300)

    def build(*, verbose: bool) -> None:
        assert places.acquire(blocking=False), "too many at once"
        all_run.wait()
        places.release()

    module = SimpleNamespace(is_aot=False, jit_library_path=tmp_path / "missing", build=build)
    monkeypatch.setattr(prefill, "modules", lambda *_, **__: [module] * 3)
    monkeypatch.setattr(hardware, "available_ram", lambda: free)
    assert compiling.compile_missing(WANTED) == 3


def test_compilers_end_with_the_server(environment: dict[str, str]) -> None:
    """They would keep every core busy for minutes."""
    server = subprocess.Popen(
        [sys.executable, "-c", f"{SERVER}time.sleep(600)"],
        env={**environment, "COMPILER": WAITING_COMPILER},
    )
    try:
        pid = _number(Path(environment["BUILT"]) / "pid", server)
        os.kill(pid, 0)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    assert _ends(pid)


def test_nothing_is_compiled_for_a_server_that_ended_already(environment: dict[str, str]) -> None:
    """Such as one that is refused in its first second, while the program imports torch."""
    built = Path(environment["BUILT"])
    subprocess.run(
        [sys.executable, "-c", SERVER + LEAVE],
        env={**environment, "COMPILER": WAITING_COMPILER},
        check=True,
    )
    program, started = int((built / "program").read_text()), built / "pid"
    try:
        assert _ends(program, unless=started)
        assert not started.exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)


def _number(path: Path, server: subprocess.Popen[bytes]) -> int:
    """What is in the file, which is complete as soon as it is there."""
    while not path.exists():
        assert server.poll() is None, "nothing was compiled"
        time.sleep(0.05)
    return int(path.read_text())


def _ends(pid: int, unless: Path | None = None) -> bool:
    """Whether a process ends soon; no longer waited for once the file `unless` exists."""
    deadline = time.monotonic() + 300
    while alive(pid) and time.monotonic() < deadline and not (unless and unless.exists()):
        time.sleep(0.05)
    return not alive(pid)
