"""Command lines of the engines: alike but for the cache and its attention. Models and artifacts of
random numbers have the shapes of real ones and pass the same checks."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.offline_process import Bulk, Case, OfflineJob
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.bench import sides
from oscar_zoo.evaluate.bench.report import CACHES, Side
from oscar_zoo.models.config_file import longest_context
from oscar_zoo.models.model_source import inspect_model
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3-hard"
KNOWN: list[ModelRecipe] = [
    recipe for recipe in Catalog.packaged().recipes() if recipe.weights is not None
]
ENGINES = sides.Engines(
    model="/m",
    random_weights=True,
    rotations=Path("/r"),
    rotations_sha256="sha256:1",
    copy_of="sha256:2",
    recipe=ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92)),
    device="cuda",
    kernels=Path("/k"),
    cases=(Case(batch=1, context=100), Case(batch=100, context=50)),
    new_tokens=10,
    repeats=1,
    requests=64,
    port=31000,
    flags=UserFlags(["--tp=2"]),
)
BF16, FP8, INT2 = SIDES = sides.all_sides(CACHES, ["flashinfer"])


def flags(side: Side, engines: sides.Engines = ENGINES) -> dict[str, str]:
    return dict(f"{argument}=".split("=")[:2] for argument in sides.arguments(side, engines))  # type: ignore[misc]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_sides_differ_in_the_cache_only(device: str) -> None:
    engines = replace(ENGINES, device=device)
    bf16, fp8, int2 = (flags(side, engines) for side in SIDES)
    assert {name for name in bf16.keys() | int2.keys() if bf16.get(name) != int2.get(name)} == {
        "--attention-backend",
        "--kv-cache-dtype",
        *(name for name in int2 if name.startswith("--oscar-")),
    }
    assert bf16["--attention-backend"] == "flashinfer" and int2["--kv-cache-dtype"] == "int2"
    assert bf16 | {"--kv-cache-dtype": "fp8_e4m3"} == fp8 and bf16["--kv-cache-dtype"] == "auto"
    assert bf16["--load-format"] == "dummy" and bf16["--max-running-requests"] == "101"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_server_gets_the_same_flags(device: str, tmp_path: Path) -> None:
    """But for the pool, which the cases of a measurement decide."""
    options = plan.ServeOptions(model="/m", recipe=ENGINES.recipe, device=device)
    staged = {"rotations": ArtifactSource(folder="/r"), "sha256": "sha256:1", "kernels": tmp_path}
    pairs = (argument.partition("=") for argument in plan.plan(options, {}, **staged).argv[4:])
    served = {name: value for name, _, value in pairs}
    measured = flags(INT2, replace(ENGINES, device=device))
    own = {"--model-path", "--host", "--port", "--max-total-tokens", "--max-running-requests"}
    own.add("--oscar-front")  # a measured engine has no HTTP server
    assert {name: measured.get(name) for name in served.keys() - own} == {
        n: served[n] for n in served.keys() - own
    }


@pytest.mark.parametrize(
    "words", [("--oscar-bits=4/2",), ("--oscar-bits", "4/2"), ("--oscar_bits=4/2",)], ids=" ".join
)
def test_flags_of_the_plugin_go_to_the_int2_side_alone(words: tuple[str, ...]) -> None:
    given = sides.read_flags(("--enable-metrics", *words, "--tp", "2"))
    engines = replace(ENGINES, flags=given)
    rest = ("--enable-metrics", "--tp", "2")
    assert sides.arguments(BF16, engines)[-len(rest) :] == rest
    assert not any("oscar" in word for word in sides.arguments(BF16, engines))
    assert sides.arguments(INT2, engines)[-len(given.words) :] == given.words


def test_a_job_waits_for_rows_instead_of_paying_for_all_of_them() -> None:
    """And a CPU's pool holds at least one of its requests."""
    small = replace(ENGINES, cases=(Case(batch=1, context=100),))
    for requests, rows in ((30, "64"), (500, "64")):
        engines = replace(small, bulk=Bulk(requests=requests, context=90_000, new_tokens=10))
        assert flags(INT2, engines)["--max-running-requests"] == rows
        assert flags(BF16, engines)["--max-running-requests"] == str(max(64, min(requests, 256)))
        on_cpu = flags(INT2, replace(engines, device="cpu"))
        assert int(on_cpu["--max-running-requests"]) == min(requests, 64)
        assert int(on_cpu["--max-total-tokens"]) >= 90_010


def test_only_conversations_have_a_prefix_cache_and_the_same_on_all_sides() -> None:
    once = Bulk(requests=3, context=50, new_tokens=10)
    for side in SIDES:
        assert "--disable-radix-cache" in sides.arguments(side, replace(ENGINES, bulk=once))
        talking = sides.arguments(side, replace(ENGINES, bulk=once.model_copy(update={"turns": 2})))
        assert "--disable-radix-cache" not in talking and "--schedule-policy=lpm" in talking


def test_a_stock_side_is_sglang_without_our_plugin(tmp_path: Path) -> None:
    environ = {"PATH": "/bin", "HF_TOKEN": "secret", "PYTHONPATH": "/extra"}
    bf16, fp8, int2 = (sides.command(side, ENGINES, tmp_path / "job", environ) for side in SIDES)
    assert bf16 == fp8
    assert (bf16.env["SGLANG_PLUGINS"], int2.env["SGLANG_PLUGINS"]) == ("none", "oscar")
    assert "HF_TOKEN" not in int2.env and int2.env["PYTHONPATH"] == "/extra"
    assert bf16.argv == int2.argv and bf16.argv[-1] == str(tmp_path / "job")


@pytest.mark.parametrize(
    ("flag", "seen"),
    [
        ("--attention-backend=triton", "--baseline"),
        ("--load_format=auto", "--dummy-weights"),
        ("--trust-remote-code", "runs code"),
        ("--kv_cache=auto", "--caches"),
    ],
)
def test_flags_that_would_make_them_differ_are_refused(flag: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        sides.read_flags(["--tp=2", flag])
    assert seen in caught.value.message
    sides.read_flags(["--tp=2", "--mem-fraction-static", "0.8"])


def test_stock_caches_are_measured_with_every_backend_and_int2_once() -> None:
    found = sides.all_sides(("int2", "bf16", "fp8", "bf16"), ["fa3", "triton", "fa3"])
    assert [side.name for side in found] == [
        "int2",
        *(f"{cache}-{backend}" for cache in ("bf16", "fp8") for backend in ("fa3", "triton")),
    ]
    assert [side.label for side in found][:2] == ["INT2", "BF16 fa3"]
    assert flags(found[2])["--attention-backend"] == "triton"
    assert len({sides.job(side, ENGINES, Path("/f")).news for side in found}) == len(found)
    assert (BF16.name, BF16.label, INT2.label) == ("bf16", "BF16", "INT2")
    for backend in ("", "../fa3", "fa3 triton", "FA3", "-x"):
        with pytest.raises(UsageError, match="not the name of an attention backend"):
            sides.all_sides(CACHES, ["triton", backend])


def test_progress_counts_the_warm_up_and_all_repeats() -> None:
    job = OfflineJob(arguments=(), cases=ENGINES.cases, new_tokens=10, news="n")
    cases = 1 * (2 * 100 + 8 + 10) + 100 * (2 * 50 + 8 + 10)  # no prompt of 64 and more
    assert job.total_tokens == cases
    long = job.model_copy(update={"cases": (Case(batch=3, context=1000),)})
    assert long.total_tokens == (1000 + 2 * 64 + 3 * 8) + 3 * (1000 + 10)
    again = 2 * (1 * (100 + 10) + 100 * (50 + 10))
    assert job.model_copy(update={"repeats": 3}).total_tokens == cases + again
    bulk = Bulk(requests=30, context=40, new_tokens=6)
    assert job.model_copy(update={"bulk": bulk}).total_tokens == cases + (30 + 2) * 46
    talks = bulk.model_copy(update={"turns": 3})
    assert [talks.prompt(turn) for turn in range(3)] == [40, 110, 180] and talks.longest == 186
    bulk_and_warm_up = (30 + 2) * (46 + 116 + 186)
    assert job.model_copy(update={"bulk": talks}).total_tokens == cases + bulk_and_warm_up


@pytest.mark.parametrize("recipe", KNOWN, ids=lambda recipe: recipe.name)
def test_a_zoo_model_has_the_cache_of_its_recipe(recipe: ModelRecipe, tmp_path: Path) -> None:
    sides.write_model(tmp_path / "m", sides.written_config(recipe), longest=1)
    assert inspect_model(str(tmp_path / "m")).geometry == recipe.geometry


def test_positions_grow_to_the_longest_request_and_never_shrink(tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 2048}
    sizes = ((100, 2048), (5000, 5000 + sides.ROOM))
    for number, (config, (longest, want)) in enumerate(
        itertools.product((inner, {"text_config": inner}), sizes)
    ):
        sides.write_model(tmp_path / str(number), config, longest=longest)
        written = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert longest_context(written) == want
    assert inner == {"max_position_embeddings": 2048}
    assert longest_context({"text_config": {}}) is None


def test_the_made_artifact_passes_verification(tmp_path: Path) -> None:
    geometry = inspect_model(str(MODEL)).geometry
    sides.write_rotations(tmp_path / "r", geometry)
    assert isinstance(verify_path(tmp_path / "r", geometry=geometry), Verified)


def test_what_prepares_images_and_text_comes_along_and_weights_do_not(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for name in ("preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "given" / name).write_text(name)
    sides.write_model(tmp_path / "m", {}, longest=1, source=tmp_path / "given")
    assert {path.name: path.read_text() for path in (tmp_path / "m").iterdir()} == {
        "config.json": "{}",
        "preprocessor_config.json": "preprocessor_config.json",
        "tokenizer.json": "tokenizer.json",
    }
