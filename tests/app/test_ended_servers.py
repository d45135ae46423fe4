"""Servers that ended by themselves: `ps` tells it, `logs` is the next step, and it is not told for
ever."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from cli_output import parsed
from served_model import identity, left, record, sleeping

from oscar_zoo.cli.main import run
from oscar_zoo.serving import records
from oscar_zoo.serving.records import ServerRecord


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


def test_a_restart_of_the_machine_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    with sleeping() as process:
        left(record(replace(identity(process), boot="another")))
        assert " UTC: the machine was restarted." in said(capsys, "ps")[1]


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
    code, _, err = said(capsys, "stop", "30000")
    assert code == 3 and "no server of yours runs here" in err


def test_stop_forgets_all_that_ended_where_none_runs(capsys: pytest.CaptureFixture[str]) -> None:
    killed()
    killed(30001)
    code, out, _ = said(capsys, "stop", "--json")
    told = parsed(out)
    assert code == 0 and told["stopped"] is None
    assert [one["port"] for one in told["forgotten"]] == [30000, 30001]
    assert said(capsys, "stop")[0] == 3


def test_stop_of_one_that_ended_leaves_those_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    killed(30001)
    with sleeping() as process:
        left(record(identity(process)))
        assert parsed(said(capsys, "stop", "30001", "--json")[1])["stopped"] is None
        assert process.poll() is None and [one.port for one in records.running()] == [30000]


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
