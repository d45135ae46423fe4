"""A hundred and fifty requests with aborts, evictions and a long queue leave nothing behind and
answer as stock SGLang does."""

from collections.abc import Iterator

import engine_cases
import pytest
from engines import Engines, needs_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

REQUESTS = 150


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """In a pool that holds about ten of them; and without aborts in stock SGLang, many at a
    time."""
    group = engine_cases.mixed_group(REQUESTS)
    runs = Engines(tmp_path_factory.mktemp("engines"))
    engine_cases.start(runs, ["small_pool"], [group])
    engine_cases.start(
        runs, ["stock_at_once"], [{name: value for name, value in group.items() if name != "abort"}]
    )
    yield runs
    runs.close()


def test_answers_are_those_of_the_stock_backend_as_far_as_they_go(engines: Engines) -> None:
    ours, stock = (
        engines.result(name)["groups"]["mixed"] for name in ("small_pool", "stock_at_once")
    )
    aborted = 0
    for got, want, ended in zip(ours["tokens"], stock["tokens"], ours["ended"], strict=True):
        aborted += ended == "abort"
        assert got == want[: len(got)]
        assert len(got) == len(want) or ended == "abort"
    assert aborted > REQUESTS / 20


def test_every_slot_and_row_is_free_again(engines: Engines) -> None:
    before, after = engines.result("small_pool")["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]
