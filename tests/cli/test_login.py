"""`oscar-zoo login`: the real client's dialogue on a pseudo-terminal, against a loopback hub."""

from __future__ import annotations

import errno
import os
import pty
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_output import parsed
from hub_server import HubServer
from hub_uses import HUB_2, VERSIONS

from oscar_zoo.cli.main import run

TOKEN = "hf_CANARYfromthekeyboard"
KEEP = ("OSCAR_ZOO_CACHE", "OSCAR_ZOO_DATA", "OSCAR_ZOO_STATE", "OSCAR_ZOO_CONFIG")


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as started:
        yield started


class Terminal:
    """`oscar-zoo ARGUMENTS` in a child on a terminal of its own; `text` is all that it showed."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.text = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "oscar_zoo", *arguments], environment)

    def paste(self, answer: str) -> None:
        """Choose to paste a token, and type `answer` where it is asked for."""
        self._wait_for("Paste an access token")
        self._wait_for("not be visible", key="2")
        os.write(self._fd, b"\x15" + answer.encode())  # Ctrl-U: the last key may have come too late

    def _wait_for(self, words: str, key: str | None = None) -> None:
        """Read until `words` are there; `key` is pressed until then, because a menu drops what
        comes too early."""
        while words not in self.text:
            if key is not None and not select.select([self._fd], [], [], 0.2)[0]:
                os.write(self._fd, key.encode())
            else:
                assert self._read(), self.text

    def interrupt(self) -> int:
        """Press Ctrl-C where a token is asked for, again when nothing comes of it; the exit
        code."""
        self.paste("\x03")
        while not select.select([self._fd], [], [], 5)[0]:
            os.write(self._fd, b"\x03")
        return self.status()

    def status(self) -> int:
        """The exit code, once the child has ended."""
        while self._read():
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], 300)
        assert ready, f"silent after: {self.text}"
        try:
            data = os.read(self._fd, 4096)
        except OSError as error:
            assert error.errno == errno.EIO  # the other end is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def environment(server: HubServer, home: Path, version: int = 1, **more: str) -> dict[str, str]:
    extra = {"PYTHONPATH": str(HUB_2)} if version == 2 else {}
    state = {name: os.environ[name] for name in KEEP}
    return server.environment(home) | state | extra | {"TERM": "xterm", "PYTHON_COLORS": "0"} | more


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pasted_token_is_checked_and_kept_by_the_client_alone(
    server: HubServer, tmp_path: Path, version: int, own_state: Path
) -> None:
    terminal = Terminal(["login"], environment(server, tmp_path, version))
    terminal.paste(TOKEN + "\n")
    assert terminal.status() == 0, terminal.text
    assert "Logged in to Hugging Face as tester" in terminal.text and TOKEN not in terminal.text
    saved = tmp_path / "token"
    assert saved.read_text() == TOKEN and stat.S_IMODE(saved.stat().st_mode) == 0o600
    ours = [path.read_bytes() for path in own_state.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in ours)
    again = Terminal(["login", "--json"], environment(server, tmp_path, version))
    assert again.status() == 0
    assert parsed(again.text) == {
        "schema": "oscar-zoo.login/1",
        "hub": "hf",
        "user": "tester",
        "source": str(saved),
    }


def test_a_token_that_the_hub_refuses_is_not_kept(server: HubServer, tmp_path: Path) -> None:
    server.fault("status", "/api/whoami-v2", code=401)
    terminal = Terminal(["login"], environment(server, tmp_path, OSCAR_ZOO_DEBUG="0"))
    terminal.paste(TOKEN + "\n")
    assert terminal.status() == 6, terminal.text
    assert "refused the token" in terminal.text and TOKEN not in terminal.text
    assert not (tmp_path / "token").exists()


def test_a_refused_variable_is_named_because_it_would_win(
    server: HubServer, tmp_path: Path
) -> None:
    server.fault("status", "/api/whoami-v2", code=401)
    terminal = Terminal(["login"], environment(server, tmp_path, HF_TOKEN=TOKEN))
    assert terminal.status() == 6
    assert "HF_TOKEN" in terminal.text and TOKEN not in terminal.text


def test_a_hub_that_never_answers_ends_the_question_who_one_is(
    server: HubServer, tmp_path: Path, own_state: Path
) -> None:
    (own_state / "config").mkdir()
    (own_state / "config" / "config.toml").write_text("[network]\nread = 0.5\n")
    terminal = Terminal(
        ["login"], environment(server, tmp_path, HF_TOKEN=TOKEN, HF_ENDPOINT=server.hang_accept())
    )
    assert terminal.status() == 5
    assert "Hugging Face" in terminal.text and "8 s" not in terminal.text


def test_ctrl_c_leaves_no_token(server: HubServer, tmp_path: Path) -> None:
    terminal = Terminal(["login"], environment(server, tmp_path))
    assert terminal.interrupt() == 130
    assert not (tmp_path / "token").exists()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_without_a_terminal_the_variable_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    token: str | None,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert run(["login"]) == 2
    line = capsys.readouterr().err
    assert "terminal" in line and "HF_TOKEN" in line and TOKEN not in line and line.count("\n") == 1
    assert run(["login", "--json"]) == 2
    assert parsed(capsys.readouterr().out)["error"]["code"] == "usage"


def test_modelscope_takes_its_variable_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    assert run(["login", "ms"]) == 2
    line = capsys.readouterr().err
    assert "MODELSCOPE_API_TOKEN" in line and "pickle" in line
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    assert run(["login", "ms"]) == 0
    assert (
        "MODELSCOPE_API_TOKEN" in (done := capsys.readouterr()).out
        and TOKEN not in done.out + done.err
    )
    assert run(["login", "ms", "--json"]) == 0
    assert parsed(capsys.readouterr().out)["source"] == "MODELSCOPE_API_TOKEN"
