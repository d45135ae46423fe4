"""Records of servers: a reused process id is never taken for a server, and what is left behind goes
away."""

from __future__ import annotations

import json
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
from oscar_zoo.serving.records import ServerRecord
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
    assert kept or "the machine was restarted" in str(records.ended()[0].end)
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


def test_follow_shows_what_was_written_just_before_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\n")
    answers = iter((True, False))

    def goes_on() -> bool:
        with log.open("a") as stream:
            stream.write("later\n")
        return next(answers)

    assert [*servers.read_log(log, lines=1, follow=goes_on)] == ["first", "later", "later"]


def killed(port: int = 30000, **changes: str) -> ServerRecord:
    """The record of a server whose process was killed."""
    with sleeping() as process:
        one = replace(record(identity(process), port), **changes)
    left(one)
    return one


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run([*words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_killed_server_is_told_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    one = killed()
    for name in (".key", ".administration-key"):
        (records.folder() / f"30000-{one.process.pid}{name}").write_text("secret")
    for _ in range(2):
        code, out, err = said(capsys, "ps")
        assert code == 0 and "No server of yours runs here" in err
        assert out.startswith("Qwen/Qwen3-8B on port 30000 ended between ")
        assert out.endswith(
            " UTC: the process that supervised it was killed. Its log: oscar-zoo logs 30000\n"
        )
    (told,) = parsed(said(capsys, "ps", "--json")[1])["ended"]
    assert (told["port"], told["ended"], told["exit_status"]) == (30000, None, None)
    assert [path.suffix for path in records.folder().iterdir()] == [".json"]


def test_one_that_noted_its_end_tells_when_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Its process may take some more seconds to end; it does not count as running."""
    with sleeping() as process:
        with records.registered(record(identity(process))) as entry:
            entry.keep_keys("key", "administration-key")
            entry.ended("its process detokenizer was killed", -9)
            assert records.running() == []
        (one,) = records.ended()
        assert one.end is not None and one.end.at is not None
        time = one.end.at[:19].replace("T", " ")
        assert said(capsys, "ps")[1].startswith(
            f"Qwen/Qwen3-8B on port 30000 ended at {time} UTC with SIGKILL:"
            " its process detokenizer was killed. "
        )
        (told,) = parsed(said(capsys, "ps", "--json")[1])["ended"]
        assert (told["ended"], told["exit_status"]) == (one.end.at, -9)
        assert [path.suffix for path in records.folder().iterdir()] == [".json"]


def test_its_log_needs_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("why it ended\n")
    killed(log=str(log))
    for words in ((), ("30000",), ("qwen3-8b",), ("--follow",)):
        code, out, err = said(capsys, "logs", *words)
        assert (code, out) == (0, "why it ended\n") and "30000 ended between " in err
    assert said(capsys, "logs", "30001")[0] == 3
    assert said(capsys, "logs", "-q") == (0, "why it ended\n", "")
    told = parsed(said(capsys, "logs", "--json")[1])
    assert (told["lines"], told["log"]) == (["why it ended"], str(log))
    assert told["ended"]["port"] == 30000
    code, out, _ = said(capsys, "logs", "--json", "--follow")
    assert (code, parsed(out)["error"]["code"]) == (2, "usage")


def test_stop_forgets_it_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not running any more, which is what `stop` is asked for."""
    killed()
    code, _, err = said(capsys, "chat")
    assert code == 3 and "was killed. Its log: oscar-zoo logs 30000" in err
    code, out, err = said(capsys, "stop", "30000")
    assert code == 0 and err == "" and out.count("\n") == 1
    assert out.startswith("Qwen/Qwen3-8B on port 30000 had already ended (")
    assert "was killed" in out and out.endswith(
        "It is forgotten now. Its log: oscar-zoo logs 30000\n"
    )
    assert said(capsys, "ps")[1] == "" and not [*records.folder().iterdir()]
    assert said(capsys, "stop", "30000")[0] == 3
    killed()
    killed(30001)
    with sleeping() as process:
        left(record(identity(process), 30002))
        told = parsed(said(capsys, "stop", "30001", "--json")[1])
        assert told["stopped"] is None and process.poll() is None
        assert [one["port"] for one in told["forgotten"]] == [30001]
        assert [one.port for one in records.running()] == [30002]


def test_when_it_ended_is_told_as_far_as_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody saw it: it was after the last line of its log, and before somebody looked."""
    log = tmp_path / "log"
    log.write_text("its last line\n")
    os.utime(log, (1_700_000_000,) * 2)  # 2023-11-14 22:13:20 UTC
    killed(since="2023-11-14T08:00:00+00:00", log=str(log))
    killed(30001, since="2023-11-16T08:00:00+00:00", log=str(tmp_path / "none"))
    rows = parsed(said(capsys, "ps", "--json")[1])["ended"]
    assert [one["last_sign"] for one in rows] == [
        "2023-11-14T22:13:20+00:00",
        "2023-11-16T08:00:00+00:00",
    ]
    noticed = rows[0]["noticed"][:19].replace("T", " ")
    assert f"ended between 2023-11-14 22:13:20 and {noticed} UTC: " in said(capsys, "ps")[1]


def test_another_server_on_its_port_takes_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    killed()
    killed(30001)
    with sleeping() as process:
        with records.registered(record(identity(process))):
            rows = parsed(said(capsys, "ps", "--json")[1])
            assert [one["port"] for one in rows["servers"]] == [30000]
            assert [one["port"] for one in rows["ended"]] == [30001]


def test_it_is_forgotten_after_days(capsys: pytest.CaptureFixture[str]) -> None:
    killed()
    assert said(capsys, "ps")[1]
    (path,) = records.folder().iterdir()
    value = json.loads(path.read_bytes())
    value["end"]["noticed"] = "2020-01-01T00:00:00+00:00"
    path.write_text(json.dumps(value))
    assert said(capsys, "ps")[1] == "" and not path.exists()
