"""The process that compiles ahead: workers wait as long as it or a fork of it lives, and a start
goes on when it fails or is killed."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tiny_artifacts import payload, write_folder

from oscar_kernels.spec import QuantSpec
from oscar_zoo.engines.sglang import compile_ahead, compiling
from oscar_zoo.engines.sglang.compile_ahead import Request
from oscar_zoo.runtime.rehearsal import Worker

SPEC = QuantSpec(64, 64, 0.9, "float16")
REQUEST = Request(
    gpu=0,
    layers=(0,),
    worker=Worker(
        specs=((SPEC, SPEC),),
        num_q_heads=4,
        num_kv_heads=2,
        sink=4,
        recent=8,
        dtype="bfloat16",
        cap=0.0,
        learned_sinks=False,
        drafts=1,
        tree=False,
        requests=4,
        max_tokens=2048,
    ),
)

PROGRAM = """
import sys
from oscar_kernels.chips import CHIPS, Target
from oscar_zoo.engines import served_artifact
from oscar_zoo.engines.sglang import compile_ahead
from oscar_zoo.engines.settings import ArtifactSource

artifact = served_artifact.load(ArtifactSource(folder=sys.argv[1]), None)
request = compile_ahead.Request.model_validate_json(sys.stdin.read())
for capability in ((9, 0), (8, 9)):
    target = Target(capability, CHIPS[capability].shared_bytes, 100)
    jobs = compile_ahead.jobs(request, artifact, target)
    print(*(x.source.main if hasattr(x, "source") else x.kernel.__name__ for x in jobs))
"""


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiling.VARIABLE, "")


def locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_the_lock_is_held_until_the_last_fork_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "import os, sys; os.fork() or sys.stdin.read(); os._exit(0)"
    with compiling.held() as (descriptor, path):
        child = subprocess.Popen(
            [sys.executable, "-c", waits], stdin=subprocess.PIPE, pass_fds=(descriptor,)
        )
    child.wait()
    monkeypatch.setenv(compiling.VARIABLE, str(path))
    assert locked(path)
    monkeypatch.setattr(compiling, "PATIENCE", 0.05)
    compiling.wait()  # gives up
    assert locked(path)
    monkeypatch.setattr(compiling, "PATIENCE", 60.0)
    assert child.stdin is not None
    child.stdin.close()
    compiling.wait()
    assert not path.exists()


def test_nobody_waits_without_a_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiling.wait()
    monkeypatch.setenv(compiling.VARIABLE, str(tmp_path / "gone"))
    compiling.wait()
    monkeypatch.delenv(compiling.VARIABLE)
    compiling.wait()


def test_a_process_that_fails_says_so_and_holds_none_up(capfd: pytest.CaptureFixture[str]) -> None:
    compile_ahead.spawn(REQUEST)  # there is no artifact
    compiling.wait()
    out, err = capfd.readouterr()
    assert "INT2 KV cache: nothing is compiled ahead (UsageError: " in out
    assert out.count("\n") == 1 and err == ""
    assert not Path(os.environ[compiling.VARIABLE]).exists()


def test_a_process_ends_with_a_server_that_ended_before_it_had_read_its_request() -> None:
    program = f"""
import os
from oscar_zoo.engines.sglang import compile_ahead
compile_ahead.spawn(compile_ahead.Request.model_validate_json({REQUEST.model_dump_json()!r}))
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_what_an_artifact_needs_is_found_without_a_gpu(tmp_path: Path) -> None:
    pair = write_folder(tmp_path / "pair", payload())
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(pair)],
        input=REQUEST.model_dump_json(),
        env=env,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    hopper, ada = (line.split() for line in ran.stdout.splitlines())
    assert hopper.count("decode.cu") == 1 and hopper.count("write.cu") == 1
    assert ada.count("decode.cu") == 1 and "write.cu" not in ada
    assert "_write_kv_int2_kernel" in ada and "_write_kv_int2_kernel" not in hopper
