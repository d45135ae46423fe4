"""Stock vLLM with our plugin gives the tokens of the reference, however its scheduler cuts prompts
and mixes requests: on a CPU exactly, on a GPU (`make gpu-check` runs this file) as near as kernels
and bfloat16 allow."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import sglang_forks
import torch
from architectures import write_architecture
from eagle_draft import write_draft
from tiny_models import change_config

import oscar_zoo
from oscar_zoo.artifact.specs import SideWidths, Widths, Windows
from oscar_zoo.evaluate.generate import GenerationRequest
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.observer import SILENT
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import open_artifact
from oscar_zoo.registry.hubs.address import Sources

ROOT = Path(__file__).resolve().parents[3]
VLLM = Path(sys.prefix) / "vllm"
MODEL, TEXT = str(ROOT / "examples/models/tiny-qwen3-hard"), ROOT / "examples/text"
CHILD = Path(__file__).with_name("vllm_child.py")
FOUND = VLLM.exists() or importlib.util.find_spec("vllm") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason="vLLM is not installed")]
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NEARLY = 0.2
"""By so much in log-probability another token may lead the one that a GPU took: more than one step
of bfloat16 between two logits of 16 to 32, 0.125."""
FEW = 0.02
"""Share of a GPU's steps in which it may be more: another rounding of a row gives another code.
With 16 recent tokens it was so in 8 of 1,800 steps of an H200, and in 10 without CUDA graphs."""
NEW, PAGE, CHUNK = 8, 32, 512
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "truncate": False,
    "original_max_position_embeddings": 2048, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""On a GPU, where one test has what torch compiles, because that takes longer than all else."""
SHARE = {"gpu_memory_utilization": 0.1}  # must be free: other tests run beside
SIZES, COUNTS = ((200, 90, 250), (700, 400)), ("draft_tokens", "accepted_tokens")
OPTIONS = {
    "model": MODEL,
    "max_model_len": 2048,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 4,
    "block_size": PAGE,
    "kv_cache_memory_bytes": 8 << 20,
    "kv_cache_dtype": "oscar_int2",
}


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    found = {"cpu": load_model(MODEL, dtype="float32", device="cpu")}
    if torch.cuda.is_available():
        found["cuda"] = load_model(MODEL, dtype="bfloat16", device="cuda")
    return found


@pytest.fixture(scope="module")
def model(models: dict[str, LoadedModel]) -> LoadedModel:
    return models["cpu"]


@pytest.fixture(scope="module")
def ids(model: LoadedModel) -> list[int]:
    found: list[int] = model.tokenizer((TEXT / "validation.txt").read_text("utf-8"))["input_ids"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made") / "rotation"
    return made(output, method="wush", calib_tokens=8192)


def made(output: Path, model: str = MODEL, **how: Any) -> Path:
    oscar_zoo.compute_artifact(
        model, calib_data=str(TEXT / "calibration.txt"), seq_len=1024, fast=True, allow_poor=True,
        device="cpu", output=output, **how,
    )  # fmt: skip
    return output


def served(
    folder: Path | None,
    rounds: Any,
    bits: str = "2",
    *,
    device: str = "cpu",
    before: bool = False,
    frozen: bool = False,
    compiled: bool = False,
    recent: int = 256,
    new: int = NEW,
    **options: Any,
) -> dict[str, Any]:
    settings = {"ROTATION_PATH": folder, "BITS": bits, "RECENT_SIZE": recent}
    chosen = {f"OSCAR_INT2_{name}": str(value) for name, value in settings.items() if value}
    paths = [str(VLLM), os.environ.get("PYTHONPATH", "")]
    usual = OPTIONS if device == "cpu" else OPTIONS | SHARE | ({} if compiled else GRAPHS)
    job = {"options": usual | options, "rounds": rounds, "new": new}
    job |= {"before": before, "frozen": frozen}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **chosen}
    if device == "cpu" and "distributed_executor_backend" not in options:
        return forked(job, env)
    done = subprocess.run(
        [sys.executable, CHILD, device],
        input=json.dumps(job),
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def forked(job: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """From a fork; a test that names how ranks are started gets fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        code = sglang_forks.vllm().call("vllm_child:forked", Path(folder), log, env, job=job)
        told = log.read_text("utf-8")
    assert code == 0, told[-3000:]
    return dict(json.loads(told.splitlines()[-1]))


def check(
    model: LoadedModel,
    folder: Path,
    found: dict[str, Any],
    prompts: list[list[int]],
    widths: Widths | None = None,
    recent: int = 256,
    near: float = 0.0,
) -> None:
    """Compute every step once more, cut as vLLM cut it; what a request found in the prefix cache
    is computed in one piece."""
    artifact = open_artifact(targets.parse(folder), Sources(None), SILENT)
    assert artifact.recipe is not None
    recipe = artifact.recipe if widths is None else artifact.recipe.with_widths(widths)
    recipe = recipe.model_copy(update={"windows": Windows(sink=64, recent=recent)})
    spec = CacheSpec(*artifact.rotations(), recipe)
    pairs = zip(found["requests"], prompts, strict=True)
    known = {name: prompt + new for (name, new, _), prompt in pairs}
    new_tokens = {name: len(new) for name, new, _ in found["requests"]}
    lengths = {name: len(all_ids) - new_tokens[name] for name, all_ids in known.items()}
    states: dict[str, tuple[GenerationRequest, int]] = {}
    leads = dict[tuple[str, int], float]()
    for what, name, number in found["events"]:
        if what == "add":
            request = GenerationRequest(model, spec)
            if number:
                request.extend(torch.tensor(known[name][:number]))
                request.begin_from_cache()
            states[name] = request, number
            continue
        request, done = states[name]
        new = known[name][done : done + number]
        if len(new) < number:  # a step that was under way when the last token came
            continue
        one = number == 1 and done > 0
        logits = request.decode(new[0]) if one else request.extend(torch.tensor(new))[-1]
        states[name] = request, done + number
        if lengths[name] <= done + number < len(known[name]):
            found_ones = logits.float().log_softmax(-1)
            lead = float(found_ones.max() - found_ones[known[name][done + number]])
            leads[name, done] = lead
    on_gpu = model.device.type == "cuda"
    most = NEARLY if on_gpu else near
    beyond = {step: lead for step, lead in leads.items() if lead > most}
    assert len(beyond) <= (max(1, FEW * len(leads)) if on_gpu else 0), beyond


def test_prompts_one_by_one(model: LoadedModel, folder: Path, ids: list[int]) -> None:
    edges = (1, 2, 63, 64, 65, 255, 256, 319, 320, 321, 512, 513, 700)
    prompts = [ids[1000 * n :][:length] for n, length in enumerate(edges)]
    found = served(folder, [[one] for one in prompts], max_num_seqs=1)
    check(model, folder, found, prompts)


def test_the_artifact_of_the_model(
    model: LoadedModel, folder: Path, ids: list[int], tmp_path: Path
) -> None:
    """Where nobody names one, it is the installed one; and nobody says how many requests."""
    hub = f"file:{tmp_path / 'zoo'}"
    oscar_zoo.publish(folder, hub=hub, create=True, unmeasured=True)
    oscar_zoo.pull(Path(MODEL).name, hubs=hub)
    found = served(None, [[ids[:400]]], max_num_seqs=None)
    assert found["blocks"] == 1 + 64 + 64
    check(model, folder, found, [ids[:400]])


@on_both
def test_prompts_together(
    models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str
) -> None:
    """Chunks of prompts beside requests that decode."""
    prompts = [ids[3000 * n :][:length] for n, length in enumerate((900, 40, 500, 330, 700, 90))]
    found = served(folder, [prompts], device=device, frozen=True, compiled=True)
    steps = [number for what, _, number in found["events"] if what == "step"]
    assert 1 in steps and max(steps) > 100
    check(models[device], folder, found, prompts)


@on_both
def test_answers_that_leave_the_window(
    models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str
) -> None:
    """What a decode step wrote is read back from its page."""
    prompts = [ids[3000 * n :][:length] for n, length in enumerate((200, 90, 300))]
    how: dict[str, Any] = {"recent": 16, "new": 60, "device": device, "frozen": True}
    found = served(folder, [prompts], **how)
    check(models[device], folder, found, prompts, recent=16)


@on_both
def test_layers_of_different_widths(
    models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str
) -> None:
    """Their pages have different sizes."""
    bits = (2, 4, 2, 2), (2, 2, 2, 4)
    prompts = [ids[3000 * n :][:length] for n, length in enumerate((700, 400))]
    found = served(folder, [prompts], "2,4,2,2/2,2,2,4", device=device, frozen=True)
    sides = (
        SideWidths(bits=own, clip=tuple(clip if b == 2 else 0.0 for b in own))
        for own, clip in zip(bits, (0.96, 0.92), strict=True)
    )
    check(models[device], folder, found, prompts, Widths(k=next(sides), v=next(sides)))


@on_both
@pytest.mark.parametrize("ranks", [1, 2])
def test_prefix_hits(
    models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str, ranks: int
) -> None:
    """A hit leaves the recent window to prefill, and finds its first tokens exact. Ranks that share
    the heads are processes of their own, beside that of the scheduler."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} GPUs")
    how: dict[str, Any] = {"device": device, "before": ranks == 1, "tensor_parallel_size": ranks}
    first = ids[:700]
    later = [ids[:480] + ids[9000:9300], ids[:50] + ids[4000:4600], ids[:700]]
    alone = [ids[20000:][: CHUNK - 1], ids[:480] + ids[7000:7300]]  # one token is left to the hit
    found = served(folder, [[first], later, alone], **how)
    cached = [number for _, _, number in found["requests"]]
    assert cached == [0, 480, 0, (700 - 256) // PAGE * PAGE, 0, 480]
    assert ["step", "5", 1] in found["events"]
    assert found["sinks"]["hits"] == 3 and found["sinks"]["lost"] == 0
    check(models[device], folder, found, [first, *later, *alone], near=0.05 * (ranks - 1))


def test_a_request_starts_again(model: LoadedModel, folder: Path, ids: list[int]) -> None:
    """Each needs one page more before it ends, and there is one in all."""
    prompts = [ids[5000 * n :][: 16 * PAGE - 4] for n in range(3)]
    found = served(folder, [prompts], num_gpu_blocks_override=1 + 3 * 16 + 1, max_model_len=1024)
    added = [name for what, name, _ in found["events"] if what == "add"]
    assert len(added) > len(set(added))
    check(model, folder, found, prompts)


def other(family: str, folder: Path, **changes: Any) -> tuple[str, Path]:
    """Another model, and a rotation for it."""
    name = str(write_architecture(family, folder / "model"))
    change_config(Path(name), **changes)
    return name, made(folder / "rotation", name, method="hadamard", calib_tokens=4096)


@pytest.mark.parametrize(
    ("family", "device"),
    [
        ("gemma3_text", "cpu"),
        ("gpt_oss", "cpu"),
        pytest.param("gemma3_text", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_layers_with_a_window(family: str, ids: list[int], device: str, tmp_path: Path) -> None:
    """They keep 16 bits in pages of the same bytes, and free what has left the window. Learned
    sinks take their share in all layers."""
    yarn = {"rope_parameters": YARN} if family == "gpt_oss" else {}  # else vLLM does not know it
    name, folder = other(family, tmp_path, **yarn)
    on_cpu = device == "cpu"
    how: dict[str, Any] = {"block_size": 512 if on_cpu else 128, "model": name, "device": device}
    # Of a random model attention averages values away, unless a few tokens come again.
    prompts = [ids[:4] * 275, ids[3000:3090]]
    later = [prompts[0][:600] + ids[7000:7400], prompts[0]]
    found = served(folder, [prompts, later], frozen=True, **how)
    assert found["groups"] == [[32 if on_cpu else 16, 2], [how["block_size"], 2]]
    # Also far in front of the end of an earlier prompt, where a recent window begins.
    assert [cached for _, _, cached in found["requests"][2:]] == [512, 512 if on_cpu else 768]
    kind = "float32" if on_cpu else "bfloat16"
    check(load_model(name, dtype=kind, device=device), folder, found, [*prompts, *later])


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_5", 1), ("qwen3_next", 1), ("qwen3_5", 2)])
def test_layers_with_a_state(family: str, ranks: int, ids: list[int], tmp_path: Path) -> None:
    """A page has as many tokens as fit in the bytes of a state, and a hit ends at one."""
    name, folder = other(family, tmp_path)
    how: dict[str, Any] = {"model": name, "max_num_seqs": 2, "tensor_parallel_size": ranks}
    prompts = [ids[3000 * n :][:size] for n, size in enumerate((1130, 90, 300))]
    later = [prompts[0] + ids[7000:7300]]
    found = served(folder, [prompts, later], frozen=ranks == 1, **how)
    assert found["groups"] == [[1120, 2], [1120, 2]]
    assert [cached for _, _, cached in found["requests"]] == [0, 0, 0, 1120]
    # Where states are rounded otherwise, a code may be another.
    near = 0.05 if family == "qwen3_next" or ranks > 1 else 0.0
    model = load_model(name, dtype="float32", device="cpu")
    check(model, folder, found, [*prompts, *later], near=near)


@pytest.mark.parametrize(
    ("how", "number", "cached"),
    [({"prefix_match_unit": 32}, 1, 544), ({"num_gpu_blocks_override": 8}, 3, 0)],
)
def test_parts_of_a_page_and_few_pages(
    how: dict[str, Any], number: int, cached: int, ids: list[int], tmp_path: Path
) -> None:
    """For a hit within a page, vLLM copies it. Where pages are few, requests start again."""
    name, folder = other("qwen3_5", tmp_path)
    prompts = [ids[3000 * n :][:4] * 143 for n in range(number)]
    later = [prompts[-1] + ids[12000:12300]]
    found = served(folder, [prompts, later], "4", frozen=True, model=name, **how)
    assert found["groups"] == [[576, 2], [576, 2]]  # a multiple of PAGE
    assert found["requests"][-1][2] == cached and found["sinks"]["lost"] == 0
    added = [name for what, name, _ in found["events"] if what == "add"]
    assert (len(added) > len(set(added))) == (number > 1)
    side = SideWidths(bits=(4, 4), clip=(0.0, 0.0))
    model = load_model(name, dtype="float32", device="cpu")
    check(model, folder, found, [*prompts, *later], Widths(k=side, v=side))


def plainly(found: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """What a server without drafts would have done: tokens come one by one behind a prompt."""
    events = list[Any]()
    for (name, new, cached), prompt in zip(found["requests"], prompts, strict=True):
        events.append(["add", name, cached])
        sizes = [number for what, one, number in found["events"] if (what, one) == ("step", name)]
        while cached < len(prompt):
            events.append(["step", name, sizes.pop(0)])
            cached += events[-1][2]
        events += [["step", name, 1]] * len(new)
    return found | {"events": events}


@on_both
def test_drafts(models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str) -> None:
    """Guessed tokens are checked in one step, with the answers of steps of one token."""
    prompts = [(ids[:60] * 9)[:500], ids[:77], ids[3000:3400]]
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
    how: dict[str, Any] = {"device": device, "frozen": True, "new": 24}
    found = served(folder, [prompts], speculative_config=ngrams, **how)
    check(models[device], folder, plainly(found, prompts), prompts)
    steps = [number for what, _, number in found["events"] if what == "step" and number <= 4]
    assert 4 in steps and len(steps) < len(prompts) * 24


@on_both
def test_drafts_of_several_counts(
    models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str
) -> None:
    """The longest model length leaves one request fewer drafts than the others of a step have."""
    prompts = [(ids[:60] * 9)[:500], (ids[500:560] * 9)[:300], (ids[900:960] * 9)[:400]]
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
    how: dict[str, Any] = {"device": device, "new": 12, "max_model_len": 512}
    how |= {"speculative_config": ngrams, "enable_prefix_caching": False}
    times = 1 if device == "cpu" else 2  # nothing may depend on when a kernel ends
    found = served(folder, [prompts] * times, **how)
    check(models[device], folder, plainly(found, prompts * times), prompts * times)
    answers = [new for _, new, _ in found["requests"]]
    assert answers[:3] == answers[-3:]
    assert {2, 3} & {number for what, _, number in found["events"] if what == "step"}


@on_both
def test_drafts_of_a_model(
    models: dict[str, LoadedModel], folder: Path, ids: list[int], device: str, tmp_path: Path
) -> None:
    """Its layer keeps 16 bits, or 32 on a CPU. There as many guesses are right as with a stock
    cache, which has the same tokens where all of a request lies in the windows."""
    trained = load_model(MODEL, dtype="float32", device=device)
    text = (TEXT / "calibration.txt").read_text("utf-8")[:40_000]
    draft = write_draft(trained, trained.tokenizer(text)["input_ids"], tmp_path / "own")
    eagle = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 2}
    how: dict[str, Any] = {
        "device": device, "new": 16, "speculative_config": eagle, "disable_log_stats": False,
        "kv_cache_memory_bytes": 16 << 20,
    }  # fmt: skip
    short, long = ([ids[3000 * n :][:size] for n, size in enumerate(sizes)] for sizes in SIZES)
    found = served(folder, [short, long, long[:1]], frozen=True, **how)
    prompts = [*short, *long, long[0]]
    check(models[device], folder, plainly(found, prompts), prompts)
    assert found["requests"][-1][2] > 300  # of the prefix cache, for both models
    counts = [found["drafts"][0][what] for what in COUNTS]
    assert counts[1] > 0
    if device == "cpu":
        stock = served(None, [short], kv_cache_dtype="auto", **how)
        assert [one[1] for one in found["requests"][:3]] == [one[1] for one in stock["requests"]]
        assert counts == [stock["drafts"][0][what] for what in COUNTS]
