"""Servers that `eval` starts: which ones, and that the failure of one is a result."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.engines.sglang.launch.variants import ServerVariant
from oscar_zoo.errors import ServerFailed, UsageError
from oscar_zoo.evaluate import servers
from oscar_zoo.observer import SILENT


@pytest.mark.parametrize(("device", "gpus", "ranks"), [("cpu", 2, {1}), (None, 2, {1, 2})])
def test_a_sweep_uses_two_ranks_where_there_are_two_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str | None, gpus: int, ranks: set[int]
) -> None:
    monkeypatch.setattr(servers.hardware, "default_device", lambda: "cuda")
    monkeypatch.setattr(servers.hardware, "visible", lambda cards: range(gpus))
    wanted = servers.sweep(device)
    assert {one.tp for one in wanted} == ranks
    assert {(one.chunk, one.page_size) for one in wanted} == {
        (chunk, page) for chunk in (512, 8192) for page in (1, 16)
    }
    assert len(servers.sweep(device, full=True)) == 8 * len(ranks) > len(wanted)


def test_one_of_several_servers_may_fail_an_only_one_not(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = ServerVariant(), ServerVariant(chunk=64, radix=False)

    @contextmanager
    def start(words: tuple[str, ...], news: object) -> Iterator[Any]:
        if "--chunked-prefill-size=64" in words:
            raise ServerFailed("it died.", hint="see the log")
        yield SimpleNamespace(client="client")

    monkeypatch.setattr(servers, "own_server", start)
    monkeypatch.setattr(servers, "_ask", lambda client, *_, radix: (client, radix))
    served: Any = SimpleNamespace(device="cpu", wanted=lambda log, *words, **_: words)
    questions: Any = SimpleNamespace(longest=9)

    def ask(*wanted: ServerVariant) -> Any:
        return servers.ask_own_servers(wanted, served, questions, SILENT)

    runs, failures = ask(bad, good)
    assert runs == [("client", True)]
    assert [(one.server, one.error.message) for one in failures] == [(str(bad), "it died.")]
    with pytest.raises(ServerFailed):
        ask(bad)


def test_a_server_with_other_settings_is_refused() -> None:
    recipe = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
    for told, fine in (({}, True), ({"sink": 64, "recent": 256}, True), ({"recent": 32}, False)):
        client: Any = SimpleNamespace(facts=lambda told=told: SimpleNamespace(recipe=told))
        with nullcontext() if fine else pytest.raises(UsageError, match="recent 32"):
            servers.check_recipe(client, recipe)


@pytest.mark.parametrize(
    ("violations", "failures", "code"), [((), 0, 0), (("off",), 0, 1), ((), 1, 1)]
)
def test_an_evaluation_passes_only_without_failures_and_violations(
    violations: tuple[str, ...], failures: int, code: int
) -> None:
    found: Any = SimpleNamespace(
        servers=(SimpleNamespace(violations=violations),), failures=("x",) * failures
    )
    assert servers.ServerReport.exit_code.fget(found) == code  # type: ignore[attr-defined]
