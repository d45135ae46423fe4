"""Ranks find each other over a port that no connection of another process takes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch import ports, stock_server
from oscar_zoo.engines.sglang.launch.rank_port import rank_port
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags


@pytest.mark.parametrize(
    ("words", "tensor_parallel"),
    [(["--tp=2"], 1), (["--tensor-parallel-size", "2"], 1), ([], 2), (["--pp=2"], 1)],
)
def test_several_ranks_get_a_port(words: list[str], tensor_parallel: int) -> None:
    (word,) = rank_port(UserFlags(words), tensor_parallel)
    name, _, port = word.partition("=")
    assert name == "--nccl-port" and int(port) in ports.NEVER_GIVEN
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", int(port)))


@pytest.mark.parametrize(
    ("words", "tensor_parallel"),
    [
        ([], 1),
        (["--tp=1"], 2),
        (["--tp=2", "--nccl-port=25000"], 1),
        (["--tp=2", "--nccl_port", "25000"], 1),
        (["--tp=2", "--dp=2"], 1),
        (["--tp=2", "--dp=2", "--enable-dp-attention"], 1),
    ],
)
def test_sglang_and_the_user_choose_the_others(words: list[str], tensor_parallel: int) -> None:
    assert rank_port(UserFlags(words), tensor_parallel) == []


def test_it_is_not_the_port_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "NEVER_GIVEN", range(24_000, 24_100))
    taken = {int(rank_port(UserFlags(["--tp=2"]), listens=24_007)[0][12:]) for _ in range(500)}
    assert 24_007 not in taken and len(taken) > 50


def test_a_stock_server_gets_one(tmp_path: Path) -> None:
    server = stock_server.StockServer(
        cache="bf16", model="some/model", revision=None, device="cuda", log=tmp_path / "log",
        timeout=1.0, flags=UserFlags(["--tp=2"]),
    )  # fmt: skip
    argv = stock_server._plan(server, 31_000).argv
    assert len([word for word in argv if word.startswith("--nccl-port=")]) == 1
