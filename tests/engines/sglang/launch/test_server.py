"""The child process: healthy or explained, and gone afterwards with everything it started."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from served_model import alive

from oscar_zoo import children
from oscar_zoo.engines.sglang.launch import processes, server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, check_port_free, free_port
from oscar_zoo.errors import ServerFailed, UsageError

SERVER = """
import http.server, subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-P", "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(grandchild.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def child_of(code: str, *arguments: str, port: int = 1) -> LaunchPlan:
    argv = (sys.executable, "-P", "-c", textwrap.dedent(code), *arguments)
    return LaunchPlan(argv, {"PATH": os.environ["PATH"]}, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("broken", [False, True])
def test_a_server_is_gone_afterwards_with_its_children(tmp_path: Path, *, broken: bool) -> None:
    """Also when the block ends by an exception."""
    port, pid_file = free_port(), tmp_path / "pid"
    plan = child_of(SERVER, str(port), str(pid_file), port=port)
    with contextlib.suppress(RuntimeError), server.running(plan, tmp_path / "log") as child:
        child.wait_until_healthy(300, lambda seconds: None)
        grandchild = int(pid_file.read_text())
        assert alive(grandchild)
        if broken:
            raise RuntimeError
    assert not alive(grandchild) and child.returncode is not None
    check_port_free("127.0.0.1", port)


def test_a_child_deaf_to_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.5)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up',"
        " flush=True); time.sleep(600)"
    )
    with server.running(child_of(stubborn), tmp_path / "log") as child:
        begun(child)
    assert child.returncode == -signal.SIGKILL


RUN = """
import os, signal, time
from pathlib import Path
from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
plan, log = LaunchPlan({argv!r}, {{}}, "http://127.0.0.1:{port}"), Path({log!r})
"""


SLEEPS = (sys.executable, "-P", "-c", "import time; time.sleep(600)")


def parent_of(argv: tuple[str, ...], log: Path, body: str, port: int = 1) -> list[str]:
    """A program of its own that does `body` with the plan and the log of a child."""
    head = RUN.format(argv=argv, port=port, log=str(log))
    return [sys.executable, "-P", "-c", head + body]


WITH_WORKER = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1]], stdout=subprocess.PIPE)
def ended(*_):
    worker.wait()
    {then}
signal.signal(signal.SIGTERM, ended)
worker.stdout.readline()
print("up", flush=True)
while True: signal.pause()
"""


def begun(child: server.Server) -> None:
    while "up" not in child.log.read_text():
        assert child.returncode is None
        time.sleep(0.01)


@pytest.mark.timeout(300)
def test_nobody_waits_for_a_lone_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang does, which takes the end of its workers for a crash."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 600)
    worker = "import time; print(flush=True); time.sleep(600)"
    with server.running(
        child_of(WITH_WORKER.format(then="time.sleep(600)"), worker), tmp_path / "log"
    ) as child:
        begun(child)
    assert child.returncode == -signal.SIGKILL


def test_stop_returns_when_workers_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then they hold memory and the port."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.1)
    worker = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " held = bytearray(b'x' * (50 << 20)); print(flush=True); time.sleep(600)"
    )
    with server.running(
        child_of(WITH_WORKER.format(then="sys.exit(0)"), worker), tmp_path / "log"
    ) as child:
        begun(child)
        assert len(processes.in_group(child.group)) == 2
        child.stop()
        assert processes.in_group(child.group) == set()


def test_workers_get_their_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gives its memory back before it ends, and the child waits for it."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 300)
    monkeypatch.setattr(server, "ALONE_SECONDS", 0.0)
    worker = """
import pathlib, signal, sys, time
def release(*_):
    time.sleep(0.5)
    pathlib.Path(%r).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, release)
print(flush=True)
while True: signal.pause()
"""
    released = tmp_path / "released"
    with server.running(
        child_of(WITH_WORKER.format(then="sys.exit(0)"), worker % str(released)), tmp_path / "log"
    ) as child:
        begun(child)
    assert released.exists()


REFUSING = """
import sys, traceback
from oscar_zoo.errors import GeometryMismatch
from oscar_zoo import engines
engines.show_errors_in_one_line()
refusal = GeometryMismatch("the artifact is for 8 layers.", hint="see: oscar-zoo list")
"""
AFTER_IT = """
try: raise refusal
except Exception: print('Scheduler hit an exception: ' + traceback.format_exc())
print('ValueError: what another worker says next')
raise RuntimeError('Rank 0 scheduler died during initialization')
"""
SAID = "print('[now] Subprocess {} (pid=7) crashed with exit code {}. Triggering.')"
PARSER = (
    "import argparse; p = argparse.ArgumentParser('launch_server.py');"
    " p.add_argument('--tp-size', type=int); p.parse_args(['{}'])"
)


@pytest.mark.parametrize(
    ("dying", "cause"),
    [
        ("raise ValueError('no support of --x')", ": ValueError: no support of --x."),
        ("sys.exit('launch: error: unrecognized arguments: --frob.')", "arguments: --frob."),
        ("raise oscar_zoo.errors.UsageError('--frob is wrong.')", ": --frob is wrong."),
        ("os.kill(os.getpid(), 9)", ": it was killed (SIGKILL)."),
        ("sys.exit(7)", " (status 7): no error in its log."),
        (
            "os.execl(sys.executable, sys.executable, '-P', '-m', 'no_engine.launch_server')",
            "No module named 'no_engine').",
        ),
        (SAID.format("detokenizer", -9), "its process detokenizer was killed."),
        (SAID.format("scheduler_0", -11), "its process scheduler_0 was ended by signal 11."),
        (SAID.format("scheduler_0", 3), "its process scheduler_0 ended with status 3."),
        (PARSER.format("--frob=1"), "unrecognized arguments: --frob=1."),
        (PARSER.format("--tp-size=two"), "invalid int value: 'two'."),
        (REFUSING + "raise refusal", "the artifact is for 8 layers. See: oscar-zoo list."),
        (REFUSING + AFTER_IT, ": the artifact is for 8 layers."),
        ("print('torch.OutOfMemoryError: 9 GiB'); raise EOFError('no answer')", "Error: 9 GiB."),
        ("print('AssertionError', flush=True); raise EOFError", ": AssertionError."),
    ],
)
def test_why_a_child_ended(tmp_path: Path, dying: str, cause: str) -> None:
    """A refusal counts before anything that follows from it; an error before what follows."""
    program = f"import os, sys, oscar_zoo.errors; print('server_args=', flush=True); {dying}"
    if "\n" in dying:
        program = dying
    with pytest.raises(ServerFailed) as caught:
        with server.running(child_of(program), tmp_path / "log") as child:
            child.wait_until_healthy(300, lambda seconds: None)
    assert caught.value.message.endswith(cause) and "\n" not in caught.value.message
    assert str(tmp_path / "log") in str(caught.value.hint)
    assert isinstance(caught.value, UsageError) == (dying.startswith("import argparse"))
    assert ("see: oscar-zoo list; log: " in str(caught.value.hint)) == ("Scheduler" in dying)


@pytest.mark.parametrize(("debug", "lines"), [("0", 1), ("1", 4)])
def test_a_refusal_that_nobody_catches_is_one_line(tmp_path: Path, debug: str, lines: int) -> None:
    env = {"PATH": os.environ["PATH"], "OSCAR_ZOO_DEBUG": debug}
    for dying, said in (("raise refusal", "the artifact is for 8 layers."), ("1 / 0", "Traceback")):
        command = [sys.executable, "-P", "-c", REFUSING + dying]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 1 and said in done.stderr
        assert said == "Traceback" or len(done.stderr.splitlines()) == lines


def test_a_child_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    missing = LaunchPlan((str(tmp_path / "nothing"),), {}, "http://127.0.0.1:1")
    for plan, said in (
        (child_of("import time; time.sleep(600)", port=free_port()), "not ready after"),
        (missing, "could not be started"),
    ):
        with pytest.raises(ServerFailed, match=said):
            with server.running(plan, tmp_path / "log") as child:
                child.wait_until_healthy(0.2, lambda seconds: None)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, "128+15"), (signal.SIGINT, "interrupt")]
)
def test_signals_to_us_end_the_child(tmp_path: Path, number: signal.Signals, status: str) -> None:
    """A real parent in a process of its own gets the signal; the child and its child are gone
    afterwards."""
    port, pid_file, log = free_port(), tmp_path / "pid", tmp_path / "log"
    body = """
try:
    with server.running(plan, log) as child:
        child.wait_until_healthy(300, lambda seconds: None)
        print("ready", flush=True)
        child.wait()
except SystemExit as stop:
    print("128+" + str(stop.code - 128))
except KeyboardInterrupt:
    print("interrupt")
"""
    parent = parent_of(child_of(SERVER, str(port), str(pid_file)).argv, log, body, port)
    process = subprocess.Popen(parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.read().strip() == status
    process.wait(timeout=300)
    assert not alive(int(pid_file.read_text()))
    check_port_free("127.0.0.1", port)


def test_sigterm_lets_the_child_finish_what_its_workers_do(tmp_path: Path) -> None:
    """The child waits for a worker that knows no signals, as SGLang waits for requests in its
    scheduler."""
    draining = (
        "import os, signal, subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)'])\n"
        # a handler may not print: it may stand in the middle of another print
        "def drain(*_): os.write(1, b'worker ended with %d\\n' % worker.wait()); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain)\n"
        "print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    body = """
with server.running(plan, log) as child:
    while "up" not in log.read_text():
        time.sleep(0.01)
    begun = child._process.wait
    def wait(*limit):
        print("ready", flush=True)
        return begun(*limit)
    child._process.wait = wait
    child.wait()
"""
    parent = parent_of((sys.executable, "-P", "-c", draining), tmp_path / "log", body)
    process = subprocess.Popen(parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "worker ended with 0" in (tmp_path / "log").read_text()


WHILE_IT_STARTS = """
start = server._start
def interrupted_start(plan, stream):
    process = start(plan, stream)
    os.kill(os.getpid(), signal.SIGINT)
    print(process.pid, flush=True)
    return process
server._start = interrupted_start
with server.running(plan, log):
    print("not reached")
"""
WHILE_THE_FIRST_UNWINDS = """
ignore = server.Signals.ignore
def late(self):
    os.kill(os.getpid(), signal.SIGTERM)
    ignore(self)
server.Signals.ignore = late
with server.running(plan, log) as child:
    print(child.group, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("body", [WHILE_IT_STARTS, WHILE_THE_FIRST_UNWINDS])
def test_a_signal_at_the_worst_moment_still_ends_the_child(tmp_path: Path, body: str) -> None:
    """The child runs and nobody holds it yet; or Ctrl-C goes to a program and to the server that it
    started, and the program sends SIGTERM at once, when nothing holds the child any more."""
    parent = parent_of(SLEEPS, tmp_path / "log", body)
    done = subprocess.run(parent, capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr and "not reached" not in done.stdout
    assert not alive(int(done.stdout))


def test_sigkill_to_us_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    """Nobody is left to clean up but the watchdog; the grandchild ignores SIGTERM, and its parent
    is gone before it."""
    stubborn = (
        "import signal, subprocess, sys, time\ncode = 'import signal, time;"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " time.sleep(600)'\nprint(subprocess.Popen([sys.executable, '-c', code]).pid,"
        " flush=True)\ntime.sleep(600)\n"
    )
    log = tmp_path / "log"
    body = """
with server.running(plan, log) as child:
    print(child.group, flush=True)
    child.wait()
"""
    parent = parent_of((sys.executable, "-P", "-c", stubborn), log, body)
    process = subprocess.Popen(parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    group = int(process.stdout.readline())
    while not log.read_text().strip():
        assert process.poll() is None
    grandchild = int(log.read_text())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 300
    while (alive(grandchild) or alive(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(grandchild) and not alive(group)


SPAWNS = """
import multiprocessing, subprocess, sys
import random
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=print)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "import random, json"], check=True)
"""


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("env", [None, {}])
def test_nothing_is_imported_from_the_current_folder(
    tmp_path: Path, env: dict[str, str] | None, *, isolated: bool
) -> None:
    """Nor by what a child starts: workers that are spawned, and programs without `-P`."""
    for name in ("random.py", "json.py", "multiprocessing.py", "encodings.py", "sitecustomize.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'a')")
    command = children.python("-c", SPAWNS, isolated=isolated)
    assert children.start(command, env=env, cwd=tmp_path).wait(60) == 0
    assert not (tmp_path / "imported").exists()


def test_a_python_that_imports_from_the_current_folder_is_not_started() -> None:
    for word in ("-m", "-c", "-u"):
        with pytest.raises(ValueError, match="-P"):
            children.start([sys.executable, word, "antigravity"])
