"""Records of servers: a reused process id is never taken for a server, and what is left behind goes
away."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_output import parsed
from raw_server import RawServer, json_answer
from served_model import identity, left, record, sleeping

from oscar_zoo.cli.main import run
from oscar_zoo.errors import ServerNotFound, UsageError
from oscar_zoo.serving import records, servers
from oscar_zoo.serving.records import ServerRecord
from oscar_zoo.serving.servers import serve_log

Child = subprocess.Popen[str]
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def child() -> Iterator[Child]:
    with sleeping() as process:
        yield process


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit code, output and errors of a command line."""

    def said(*words: str) -> tuple[int, str, str]:
        code = run([*words])
        return code, *capsys.readouterr()

    return said


def killed(port: int = 30000, **changes: str) -> ServerRecord:
    """The record of a server whose process was killed."""
    with sleeping() as process:
        one = replace(record(identity(process), port), **changes)
    left(one)
    return one


def told(said: Said, *words: str) -> Any:
    return parsed(said(*words, "--json")[1])


def test_a_record_is_private_and_gone_afterwards(child: Child) -> None:
    with records.registered(replace(record(identity(child)), state="starting")) as entry:
        path = entry.record.path
        modes = [place.stat().st_mode & 0o777 for place in (path, path.parent)]
        assert modes == [0o600, 0o700]
        entry.change(state="ready", model="a-name")
        (found,) = records.running()
        assert (found.state, found.model) == ("ready", "a-name") and found == entry.record
    assert not path.exists() and records.running() == []


def test_another_process_with_the_same_number_is_not_the_server(child: Child) -> None:
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
    child: Child, change: dict[str, str], kept: bool
) -> None:
    path = left(record(replace(identity(child), **change)))
    assert records.running() == []
    assert kept or "the machine was restarted" in str(records.ended()[0].end)
    assert run(["stop"]) == (3 if kept else 0)
    assert child.poll() is None and path.exists() == kept


def test_a_process_that_has_ended_is_gone_before_its_parent_looks(child: Child) -> None:
    one = identity(child)
    assert one.alive and not one.wait(0)
    assert one.send(signal.SIGKILL) and one.wait(60)
    assert not one.alive and not one.send(signal.SIGTERM)


def test_what_is_no_record_is_ignored(child: Child) -> None:
    good = left(record(identity(child)))
    for number, text in enumerate(("{", "[]", '{"process": {}}', '{"process": {"pid": 1}}')):
        good.with_name(f"{number}.json").write_text(text)
    assert len(records.running()) == 1


def test_a_server_is_called_by_port_model_or_artifact(child: Child, said: Said) -> None:
    left(record(identity(child)))
    for name in ("30000", "qwen3-8b", "Qwen/Qwen3-8B", "Qwen3-8B:seq20000_prompt83_group128", None):
        assert records.find(name, "stop").port == 30000
    with pytest.raises(ServerNotFound, match=r"Running: Qwen/Qwen3-8B on port 30000"):
        records.find("30001", "stop")
    left(record(identity(child), port=30001))
    with pytest.raises(UsageError, match="2 servers run") as caught:
        records.find("qwen3-8b", "logs")
    assert str(caught.value.hint).endswith("oscar-zoo logs 30000")
    lines = said("ps")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["PORT", "30000", "30001"]


@pytest.mark.parametrize("outside", [None, False, True])
def test_ps_tells_of_the_canary(child: Child, said: Said, outside: bool | None) -> None:
    names = {None: None, False: "in band", True: "out of band"}
    answer = json_answer({} if outside is None else {"canary": {"outside": outside}})
    with RawServer(lambda connection, _: connection.sendall(answer)) as server:
        left(replace(record(identity(child), server.port), url=f"{server.url}/v1"))
        assert [one["canary"] for one in told(said, "ps")["servers"]] == [names[outside]]
    assert [one["canary"] for one in told(said, "ps")["servers"]] == [None]


@pytest.mark.parametrize(("words", "number"), [([], signal.SIGTERM), (["--now"], signal.SIGINT)])
def test_stop_waits_for_the_end(
    child: Child, said: Said, words: list[str], number: signal.Signals
) -> None:
    left(record(identity(child)))
    stopped = {"port": 30000, "model_id": "Qwen/Qwen3-8B", "pid": child.pid}
    assert told(said, "stop", *words)["stopped"] == stopped
    assert child.wait() == -number and not list(records.folder().iterdir())


def test_the_end_of_a_log_without_control_codes(child: Child, tmp_path: Path, said: Said) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo \x1b[31mred\x1b[0m\nthree \xff\n")
    left(replace(record(identity(child)), log=str(log)))
    assert said("logs", "-n", "2")[:2] == (0, "two [31mred[0m\nthree \ufffd\n")
    assert said("logs", "30001")[0] == 3


def test_a_pipe_gets_the_whole_log_unless_a_number_is_given(said: Said) -> None:
    """However long it is: what searches a log has to see the beginning, too."""
    lines = [f"{number} {'x' * 9000}" for number in range(250)]
    serve_log(30001).write_text("\n".join(lines))
    for words, first in (((), 0), (("-n", "all"), 0), (("-n", "200"), 50), (("--lines=1",), 249)):
        code, out, _ = said("logs", "30001", *words)
        assert code == 0 and out.splitlines() == lines[first:]
    for wrong in ("0", "-1", "many"):
        code, _, err = said("logs", "30001", "--lines", wrong)
        assert code == 2 and "or all" in err


def test_without_a_server_the_newest_log_is_named(said: Said) -> None:
    assert said("logs")[0] == said("logs", "30001")[0] == 3 and not servers.logs_dir().exists()
    for age, port in enumerate((30001, 30002, 30000)):
        log = serve_log(port)
        log.write_text(f"of {port}\n")
        os.utime(log, (1000 - 100 * age,) * 2)
    for other in ("serve-else.log", "bench-int2.log"):
        serve_log(30002).with_name(other).write_text("")
    code, _, err = said("logs")
    assert code == 3 and err.strip().endswith("oscar-zoo logs 30001")
    assert said("logs", "30001")[:2] == (0, "of 30001\n")
    code, _, err = said("stop")
    assert code == 3 and "oscar-zoo logs" not in err


def test_follow_shows_what_was_written_just_before_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\n")
    answers = iter((True, False))

    def goes_on() -> bool:
        with log.open("a") as stream:
            stream.write("later\n")
        return next(answers)

    assert [*servers.read_log(log, lines=1, follow=goes_on)] == ["first", "later", "later"]


def test_a_killed_server_is_told_with_the_next_step(said: Said) -> None:
    one = killed()
    for name in (".key", ".administration-key"):
        (records.folder() / f"30000-{one.process.pid}{name}").write_text("secret")
    for _ in range(2):
        code, out, err = said("ps")
        assert code == 0 and "No server of yours runs here" in err
        assert out.startswith("Qwen/Qwen3-8B on port 30000 ended between ")
        assert out.endswith("it was killed. Its log: oscar-zoo logs 30000\n")
    (row,) = told(said, "ps")["ended"]
    assert (row["port"], row["ended"], row["exit_status"]) == (30000, None, None)
    assert [path.suffix for path in records.folder().iterdir()] == [".json"]


def test_one_that_noted_its_end_tells_when_and_why(said: Said) -> None:
    """Its process may take some more seconds to end; it does not count as running."""
    with sleeping() as process:
        with records.registered(record(identity(process))) as entry:
            entry.keep_keys("key", "administration-key")
            entry.ended("its process detokenizer was killed", -9)
            assert records.running() == []
        (one,) = records.ended()
        assert one.end is not None and one.end.at is not None
        time = one.end.at[:19].replace("T", " ")
        assert f"ended at {time} UTC with SIGKILL: its process detokenizer" in said("ps")[1]
        (row,) = told(said, "ps")["ended"]
        assert (row["ended"], row["exit_status"]) == (one.end.at, -9)
        assert [path.suffix for path in records.folder().iterdir()] == [".json"]


def test_its_log_needs_no_name(tmp_path: Path, said: Said) -> None:
    log = tmp_path / "log"
    log.write_text("why it ended\n")
    killed(log=str(log))
    for words in ((), ("30000",), ("qwen3-8b",), ("--follow",)):
        code, out, err = said("logs", *words)
        assert (code, out) == (0, "why it ended\n") and "30000 ended between " in err
    assert said("logs", "30001")[0] == 3
    assert said("logs", "-q") == (0, "why it ended\n", "")
    facts = told(said, "logs")
    assert (facts["lines"], facts["log"]) == (["why it ended"], str(log))
    assert facts["ended"]["port"] == 30000
    assert told(said, "logs", "--follow")["error"]["code"] == "usage"


def test_stop_forgets_it_and_says_so(said: Said) -> None:
    """It is not running any more, which is what `stop` is asked for."""
    killed()
    code, _, err = said("chat")
    assert code == 3 and "was killed. Its log: oscar-zoo logs 30000" in err
    code, out, err = said("stop", "30000")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert "on port 30000 had already ended (" in out and "was killed" in out
    assert said("ps")[1] == "" and not [*records.folder().iterdir()]
    assert said("stop", "30000")[0] == 3
    killed()
    killed(30001)
    with sleeping() as process:
        left(record(identity(process), 30002))
        facts = told(said, "stop", "30001")
        assert facts["stopped"] is None and process.poll() is None
        assert [one["port"] for one in facts["forgotten"]] == [30001]
        assert [one.port for one in records.running()] == [30002]


def test_when_it_ended_is_told_as_far_as_it_is_known(tmp_path: Path, said: Said) -> None:
    """Nobody saw it: it was after the last line of its log, and before somebody looked."""
    log = tmp_path / "log"
    log.write_text("its last line\n")
    os.utime(log, (1_700_000_000,) * 2)  # 2023-11-14 22:13:20 UTC
    killed(since="2023-11-14T08:00:00+00:00", log=str(log))
    killed(30001, since="2023-11-16T08:00:00+00:00", log=str(tmp_path / "none"))
    rows = told(said, "ps")["ended"]
    signs = [one["last_sign"] for one in rows]
    assert signs == ["2023-11-14T22:13:20+00:00", "2023-11-16T08:00:00+00:00"]
    noticed = rows[0]["noticed"][:19].replace("T", " ")
    assert f"ended between 2023-11-14 22:13:20 and {noticed} UTC: " in said("ps")[1]


def test_it_is_forgotten_after_days_and_when_another_server_takes_its_port(said: Said) -> None:
    killed()
    path = left(killed(30001))
    with sleeping() as process:
        with records.registered(record(identity(process))):
            rows = told(said, "ps")
            ports = [[one["port"] for one in rows[kind]] for kind in ("servers", "ended")]
            assert ports == [[30000], [30001]]
    value = json.loads(path.read_bytes())
    value["end"] = {"cause": "killed", "noticed": "2020-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(value))
    assert said("ps")[1] == "" and not path.exists()
