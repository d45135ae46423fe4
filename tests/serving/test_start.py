"""`oscar_zoo.serve` from Python: a server that belongs to a block, and to this process."""

import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import served_model
from recorder import Recorder
from served_model import all_children, cmdline

import oscar_zoo
from oscar_zoo import children
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli import main as cli
from oscar_zoo.engines.sglang.launch import plan, server
from oscar_zoo.engines.sglang.launch.server import STOPPED
from oscar_zoo.errors import PortInUse, ServerFailed, UsageError
from oscar_zoo.serving import detach, records

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


def arguments(artifact: Path, port: int) -> Mapping[str, object]:
    return {"target": artifact, "model": str(MODEL), "port": port, "device": "cpu"}


def test_a_server_lives_in_its_block(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, listener = served_model.take_its_place(monkeypatch, dies=False), Recorder()
    before = signal.getsignal(signal.SIGINT)
    with oscar_zoo.serve(**arguments(artifact, port), observer=listener) as server:
        assert server.url == f"http://127.0.0.1:{port}/v1" and server.log.is_file()
        assert json.load(urllib.request.urlopen(f"{server.url}/models"))["data"] == [{"id": "m"}]
        assert server.model_id == "m" and server.facts.capacity == 9
        assert server.digest.startswith("sha256:") and server.device == "cpu"
        (record,) = records.running()
        assert (record.state, record.port, record.process.pid) == ("ready", port, server.pid)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{server.url}/models")
    assert records.running() == [] and signal.getsignal(signal.SIGINT) == before
    assert listener.codes == ["server.starting"]
    assert listener.progress and {unit for _, unit in listener.progress} == {"s"}
    server.stop()  # a second end changes nothing


def test_stop_ends_it_without_a_block(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log says so, because SGLang says that its processes crashed with exit code -15."""
    port = served_model.take_its_place(monkeypatch, dies=False)
    server = oscar_zoo.serve(**arguments(artifact, port))
    with pytest.raises(PortInUse, match=f"port {port} is taken"):
        oscar_zoo.serve(**arguments(artifact, port))
    server.stop()
    assert records.running() == []
    assert server.log.read_text().splitlines()[-1] == STOPPED.decode().strip()


def test_another_thread_may_start_one(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals belong to the main thread, and a thread that ends must not end the server."""
    port = served_model.take_its_place(monkeypatch, dies=False)
    started: list[oscar_zoo.RunningServer] = []
    thread = threading.Thread(
        target=lambda: started.append(oscar_zoo.serve(**arguments(artifact, port)))
    )
    thread.start()
    thread.join()
    (server,) = started
    assert json.load(urllib.request.urlopen(f"{server.url}/models"))["data"] == [{"id": "m"}]
    server.stop()


def test_a_server_that_ended_says_why(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = served_model.take_its_place(monkeypatch, dies=True)
    with oscar_zoo.serve(**arguments(artifact, port)) as server:
        with pytest.raises(ServerFailed, match=r"the server ended: .*it fell over\."):
            server.wait()
    (record,) = records.ended()
    assert record.end is not None and record.end.cause.endswith("it fell over")
    assert record.port == port and record.end.exit_status == 3
    assert STOPPED not in server.log.read_bytes()


def test_an_engine_that_was_killed_says_so(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does so when memory runs out, and nothing is in the log then."""
    port = served_model.take_its_place(monkeypatch, dies=False)
    with oscar_zoo.serve(**arguments(artifact, port)) as server:
        (engine,) = (pid for pid in all_children(server.pid) if b"HTTPServer" in cmdline(pid))
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(
            ServerFailed, match=r"the server ended: it was killed \(SIGKILL\)\."
        ) as error:
            server.wait()
    assert "without free memory" in str(error.value.hint) and "log: " in str(error.value.hint)
    (record,) = records.ended()
    assert record.end is not None and record.end.cause == "it was killed (SIGKILL)"
    assert records.told(record).endswith(" UTC: it was killed (SIGKILL)")


def test_the_command_has_what_callers_say(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Exception):
        pass

    seen: list[plan.ServeOptions] = []

    def planned(options: plan.ServeOptions, *_: object, **__: object) -> plan.LaunchPlan:
        seen.append(options)
        raise Planned

    port = served_model.take_its_place(monkeypatch, dies=False)
    monkeypatch.setattr(plan, "plan", planned)
    flags: Sequence[str] = ["--page-size=16"]
    with pytest.raises(Planned):
        oscar_zoo.serve(**arguments(artifact, port), clip=(0.5, 0.25), flags=flags)
    (options,) = seen
    assert options.recipe.clip == Clip(k=0.5, v=0.25) and options.flags.words == ("--page-size=16",)
    assert options.model == str(MODEL) and options.port == port
    assert records.running() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flags": ["--host=0.0.0.0"]}, "--host is not allowed"),
        ({"expose": "0.0.0.0"}, "needs an API key"),
        ({"clip": (2.0, 0.0)}, "clip ratios"),
    ],
)
def test_a_senseless_request(artifact: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        oscar_zoo.serve(**{**arguments(artifact, 30000), **changes})


def test_sigterm_is_told_before_requests_drain(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = served_model.take_its_place(monkeypatch, dies=False)
    wait = server.Server.wait

    def terminated(child: server.Server, draining: Callable[[], None]) -> int:
        monkeypatch.setattr(server.subprocess.Popen, "wait", signalled)
        return wait(child, draining)

    def signalled(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(server.subprocess.Popen, "wait", real)
        os.kill(os.getpid(), signal.SIGTERM)
        return real(process, timeout)

    real = server.subprocess.Popen.wait
    monkeypatch.setattr(server.Server, "wait", terminated)
    words = ["serve", str(artifact), "--model", str(MODEL), "--port", str(port), "--device", "cpu"]
    assert cli.run(words) == 0
    said = capsys.readouterr().err
    assert "a second signal ends them" in said and "300 s" in said
    assert said.index("SIGTERM: 2 running requests finish") < said.index("Stopped by SIGTERM")


def test_a_signal_around_a_background_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the process was started, and before anybody holds it."""
    begun: list[subprocess.Popen[bytes]] = []
    real = children.start

    def interrupted(*words: Any, **given: Any) -> Any:
        begun.append(real(*words, **given))
        os.kill(os.getpid(), signal.SIGINT)
        return begun[0]

    monkeypatch.setattr(children, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), detach._child(["--version"], 1):
        raise AssertionError("it goes on after Ctrl-C")
    assert begun[0].poll() is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
