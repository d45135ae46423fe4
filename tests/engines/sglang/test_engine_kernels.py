"""Stock SGLang with the path of a GPU, on a CPU: the kernels interpreted in float32, fed by the
engine's own batches.

What a GPU adds and this cannot show: CUDA graphs, FlashInfer, and the speed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from engines import Engines, needs_sglang, text_tokens
from tiny_artifacts import artifact_files, write_folder

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

WINDOWS = {"OSCAR_INT2_SINK_SIZE": "4", "OSCAR_INT2_RECENT_SIZE": "8"}
NEW = 2


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    rotations = write_folder(folder / "rotations", artifact_files())
    runs = Engines(folder)
    for name, extra in (("plain", {}), ("kernels", {"INT2_TEST_OPS": "kernels"})):
        env = {**WINDOWS, "OSCAR_INT2_ROTATION_PATH": str(rotations), **extra}
        engine = {"kv_cache_dtype": "int2", "max_running_requests": 2, "chunked_prefill_size": 32}
        runs.start(name, env=env, job={"engine": engine, "groups": groups()})
    yield runs
    runs.close()


def groups() -> list[dict[str, Any]]:
    """A prompt of two chunks, then its first part again (a hit) beside another request, then a
    second turn."""
    ids = text_tokens()
    one, other = ids[100:140], ids[4000:4010]
    return [
        {"name": "chunks", "prompts": [one], "new": NEW},
        {"name": "hit", "prompts": [[*one[:30], 5, 6], other], "new": NEW},
        {"name": "turn2", "prompts": [{"of": ["chunks", 0], "append": ids[50:53]}], "new": NEW},
    ]


def test_the_engine_reads_the_same_through_the_kernels(engines: Engines) -> None:
    plain, kernels = (engines.result(name)["groups"] for name in ("plain", "kernels"))
    assert kernels["hit"]["cached"] == [32 - 8, 0]
    assert kernels["turn2"]["cached"] == [40 + NEW + 3 - 8]
    for name, group in plain.items():
        assert kernels[name]["tokens"] == group["tokens"]
        for mine, theirs in zip(kernels[name]["logprobs"], group["logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=2e-3)


def test_it_did_run_the_kernels(engines: Engines) -> None:
    (plain,), (kernels,) = (engines.result(name)["reports"] for name in ("plain", "kernels"))
    assert (plain["ops"], kernels["ops"]) == ("", "kernels")
    assert plain["reads"] and not kernels["reads"]  # only the references are counted
