"""What hybrid models need on a GPU, as far as SGLang's own code shows it without one, on every
release.

The prefix cache saves a state early enough for a hit that leaves the recent window to prefill: the
scheduler says what it makes of the place that we name. On Blackwell, SGLang asks for names of
attention backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import RELEASES, Engines, needs_sglang

RECENT = 256


def case(prefix: int, *passes: int, branch: int | None = None) -> dict[str, Any]:
    return {
        "length": passes[-1],
        "passes": passes,
        "prefix": prefix,
        "branch": branch,
        "recent": RECENT,
    }


CASES = {
    "one pass": (case(0, 1000), [704]),
    "behind a hit": (case(640, 1000), [704]),
    "in the second of two passes": (case(0, 512, 1000), [512, 704]),
    "in the first of two passes": (case(0, 960, 1000), [704, None]),
    "a branch that was found stays": (case(0, 1000, branch=320), [320]),
    "a prompt that ends too soon": (case(704, 900), [896]),
}
OFF_GRID = case(0, 500, 1000)


@pytest.fixture(scope="module", params=RELEASES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"), request.param)
    yield runs
    runs.close()


@needs_sglang
@pytest.mark.sglang
def test_sglang_saves_the_state_there(engines: Engines) -> None:
    cases = [asked for asked, _ in CASES.values()]
    found = engines.call("engine_calls:saved_places", cases=[*cases, OFF_GRID])
    assert dict(zip(CASES, found, strict=False)) == {
        name: want for name, (_, want) in CASES.items()
    }
    # Before 0.5.21 a place must be a multiple of the step, so none is named for the second pass.
    assert found[-1] == ([448, 948] if engines.release == "0.5.17" else [448, 692])


@needs_sglang
@pytest.mark.sglang
def test_our_backend_goes_beside_linear_attention_on_blackwell(engines: Engines) -> None:
    said = engines.call("engine_calls:wrapped")
    assert said["ours"] == ["full", "linear", [1, 3]]
    assert "backends are supported on Blackwell" in said["without"]
    assert said["names"] == ["oscar_int2"] * 3
