"""Records of servers: a reused process id is never taken for a server, and what is left behind goes
away."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_output import parsed
from served_model import identity, left, record, sleeping

from oscar_zoo.cli.main import run
from oscar_zoo.errors import ServerNotFound, UsageError
from oscar_zoo.serving import records, servers
from oscar_zoo.serving.servers import serve_log


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with sleeping() as process:
        yield process


def test_a_record_is_private_and_gone_afterwards(child: subprocess.Popen[str]) -> None:
    with records.registered(replace(record(identity(child)), state="starting")) as entry:
        assert (
            entry.record.path.stat().st_mode & 0o777 == 0o600
            and entry.record.path.parent.stat().st_mode & 0o777 == 0o700
        )
        entry.change(state="ready", model="a-name")
        (found,) = records.running()
        assert (found.state, found.model) == ("ready", "a-name") and found == entry.record
    assert not entry.record.path.exists() and records.running() == []


def test_another_process_with_the_same_number_is_not_the_server(
    child: subprocess.Popen[str],
) -> None:
    """The number was given to a process that started later; it must not get a signal."""
    earlier = replace(identity(child), start=identity(child).start - 1)
    path = left(record(earlier))
    assert not earlier.alive and not earlier.send(signal.SIGKILL) and earlier.wait(0)
    assert run(["stop", "30000"]) == 0
    assert not path.exists() and child.poll() is None


@pytest.mark.parametrize(
    ("change", "kept"), [({"boot": "another"}, False), ({"place": "other-host/1"}, True)]
)
def test_records_of_before_a_restart_go_and_those_of_other_machines_stay(
    child: subprocess.Popen[str], change: dict[str, str], kept: bool
) -> None:
    path = left(record(replace(identity(child), **change)))
    assert records.running() == []
    assert run(["stop"]) == (3 if kept else 0)
    assert child.poll() is None and path.exists() == kept


def test_a_process_that_has_ended_is_gone_before_its_parent_looks(
    child: subprocess.Popen[str],
) -> None:
    one = identity(child)
    assert one.alive and not one.wait(0)
    assert one.send(signal.SIGKILL) and one.wait(60)
    assert not one.alive and not one.send(signal.SIGTERM)


def test_what_is_no_record_is_ignored(child: subprocess.Popen[str]) -> None:
    for number, text in enumerate(
        ("{", "[]", '{"process": {}}', '{"process": {"pid": 1}, "odd": 2}')
    ):
        left(record(identity(child))).with_name(f"{number}.json").write_text(text)
    assert len(records.running()) == 1


def test_a_server_is_called_by_port_model_or_artifact(
    child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    one = identity(child)
    left(record(one))
    for name in ("30000", "qwen3-8b", "Qwen/Qwen3-8B", "Qwen3-8B:seq20000_prompt83_group128", None):
        assert records.find(name, "stop").port == 30000
    with pytest.raises(
        ServerNotFound, match=r"called 30001\. Running: Qwen/Qwen3-8B on port 30000"
    ):
        records.find("30001", "stop")
    left(record(one, port=30001))
    with pytest.raises(UsageError, match="2 servers run") as caught:
        records.find("qwen3-8b", "logs")
    assert str(caught.value.hint).endswith("oscar-zoo logs 30000")
    assert run(["ps"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "PORT",
        "30000",
        "30001",
    ]


def test_stop_waits_for_the_end(
    child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    left(record(identity(child)))
    assert run(["stop", "--json"]) == 0
    told = parsed(capsys.readouterr().out)
    assert told["stopped"] == {"port": 30000, "model_id": "Qwen/Qwen3-8B", "pid": child.pid}
    assert child.wait() == -signal.SIGTERM and not list(records.folder().iterdir())


def test_stop_now_interrupts(child: subprocess.Popen[str]) -> None:
    left(record(identity(child)))
    assert run(["stop", "--now", "-q"]) == 0
    assert child.wait() == -signal.SIGINT


def test_the_end_of_a_log_without_control_characters(
    child: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo \x1b[31mred\x1b[0m\nthree \xff\n")
    left(replace(record(identity(child)), log=str(log)))
    assert run(["logs", "-n", "2"]) == 0
    assert capsys.readouterr().out == "two [31mred[0m\nthree \ufffd\n"
    assert run(["logs", "30001"]) == 3


def test_a_pipe_gets_the_whole_log_unless_a_number_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However long it is: what searches a log has to see the beginning, too."""
    lines = [f"{number} {'x' * 9000}" for number in range(250)]
    serve_log(30001).write_text("\n".join(lines))
    for words, first in (((), 0), (("-n", "all"), 0), (("-n", "200"), 50), (("--lines=1",), 249)):
        assert run(["logs", "30001", *words]) == 0
        assert capsys.readouterr().out.splitlines() == lines[first:]
    for wrong in ("0", "-1", "many"):
        assert run(["logs", "30001", "--lines", wrong]) == 2
        assert "or all" in capsys.readouterr().err


def test_without_a_server_the_newest_log_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs"]) == 3
    assert "Start one: oscar-zoo serve NAME" in capsys.readouterr().err
    for age, port in enumerate((30001, 30002, 30000)):
        log = serve_log(port)
        log.write_text(f"of {port}\n")
        os.utime(log, (1000 - 100 * age,) * 2)
    serve_log(30002).with_name("serve-else.log").write_text("")
    serve_log(30002).with_name("bench-int2.log").write_text("")
    assert run(["logs"]) == 3
    line = capsys.readouterr().err.strip()
    assert "no server of yours runs here" in line and line.endswith("oscar-zoo logs 30001")
    assert run(["logs", "30001"]) == 0 and capsys.readouterr().out == "of 30001\n"
    assert run(["stop"]) == 3 and "oscar-zoo logs" not in capsys.readouterr().err


def test_follow_shows_what_was_written_just_before_the_end(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.write_text("first\n")
    answers = iter((True, False))

    def goes_on() -> bool:
        with log.open("a") as stream:
            stream.write("later\n")
        return next(answers)

    assert [*servers.read_log(log, lines=1, follow=goes_on)] == ["first", "later", "later"]
