"""Models whose layers do not all keep every key and value: a small Gemma 3, partly with a sliding
window, which stock SGLang keeps in one pool and an INT2 server in two; a small Gemma 4, whose other
layers also have heads of another width; and a small LFM2, where convolutions and full attention
take turns.

In lossless mode tokens are those of the stock backend. With INT2 slots they are those of a
reference that runs the whole sequence in this process, on every supported release. Wrong maps from
layers to stores, and from token slots to sliding slots, show that both comparisons can fail. The
convolutions run in PyTorch (`plain_convolutions`), in the stock server as well.

Without an INT2 cache SGLang serves Gemma 4 on a CPU from 0.5.21 on. From 0.5.23 on it reads it with
a newer transformers than the one that is installed here.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_cases
import pytest
from engine_cases import (
    DONOR,
    GEOMETRIES,
    NEW,
    RECENT,
    SINK,
    answers,
    logprobs,
    one_at_a_time,
    retractions,
    turns,
)
from engines import CHUNK, ENGINE, INSTALLED, RELEASES, Engines, needs_sglang, recall_prompts
from reference_server import Served, WholeReference, equal_answers, equal_tokens, reference_of

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.sglang.capacity import PIECE, Planner, caches
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_layers import other_layers
from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES
from oscar_zoo.runtime.slot_plans import TOKENS_PER_PREFIX, SlidingDemand, StateDemand

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

FAMILIES = {"windows": "gemma3_text", "two_sizes": "gemma4", "hybrid": "Lfm2"}
SERVED = {
    "windows": RELEASES,
    "two_sizes": RELEASES[: RELEASES.index("0.5.23")],
    "hybrid": RELEASES,
}
OTHERS = ("exaone4", "gpt_oss", "mellum")
HERE = [(kind, INSTALLED) for kind in FAMILIES]
LOSSLESS = [*HERE, *(("hybrid", one) for one in RELEASES if one != INSTALLED)]
CODES = [(kind, release) for kind, releases in SERVED.items() for release in releases]
RECIPE = ServingRecipe(
    group_size=64, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=SINK, recent=RECENT)
)


class Runs(Engines):
    """Engines of one family, by the names of `engine_cases` without that of the family."""

    def __init__(self, kind: str, release: str, folder: Path) -> None:
        super().__init__(folder, release)
        self.kind, self.full = kind, GEOMETRIES[FAMILIES[kind]].attention_layers

    def begin(self, names: list[str], groups: list[dict[str, Any]]) -> None:
        engine_cases.start(self, map(self.full_name, names), groups)

    def full_name(self, name: str) -> str:
        return f"{self.kind}_{name}".removesuffix("_")

    def run(self, name: str = "") -> dict[str, Any]:
        return self.result(self.full_name(name))

    def planner(self) -> Planner:
        """As `fit-gpu` plans for the model."""
        family = FAMILIES[self.kind]
        others = other_layers(ConfigFile.of_folder(self.folder / family), self.full)
        plain, _, int2 = caches(GEOMETRIES[family], RECIPE, Layout(), others)
        return Planner(int2, plain.token, RECIPE.windows, others)


@pytest.fixture(scope="module", params=LOSSLESS, ids="-".join)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    kind, release = request.param
    made = Runs(kind, release, tmp_path_factory.mktemp("engines"))
    sizes = {"new": 8} if kind == "hybrid" else {"queue": 14, "new": 40}
    groups = engine_cases.scheduling_groups(**sizes)
    at_once = groups[:4]
    if release != INSTALLED:  # a first turn, a second one, and the queue
        groups, at_once = [groups[0], *groups[2:4]], [groups[0], groups[2]]
    made.begin(["stock", ""], [*groups, *turns()])
    made.begin(["at_once"], at_once)
    if kind == "hybrid":
        made.begin(["few_states"], groups[:1])
    if kind == "windows":
        made.begin(["wrong_slots"], groups[:4])
        made.begin([*OTHERS], one_at_a_time()[:1])
    if release == INSTALLED:
        made.begin([] if kind == "two_sizes" else ["one_layer"], groups[:1])
        made.begin(["swapped"], one_at_a_time()[:-1])
    yield made
    made.close()


@pytest.fixture(scope="module", params=CODES, ids="-".join)
def codes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    made = Runs(*request.param, tmp_path_factory.mktemp("codes"))
    made.begin(["int2"], one_at_a_time())
    yield made
    made.close()


Reference = Callable[[str], tuple[WholeReference, list[Served]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The reference of a family, and what it makes of the prompts, for every release."""

    @functools.cache
    def of(kind: str) -> tuple[WholeReference, list[Served]]:
        made = reference_of(FAMILIES[kind], tmp_path_factory.mktemp("reference"))
        return made, [made.generate(ids, NEW) for ids in recall_prompts()]

    return of


def only(fixture: str, kind: str, releases: tuple[str, ...] = (INSTALLED,)) -> pytest.MarkDecorator:
    """For a test of one family; of a comparison, which is the same one for every release."""
    asked = [(kind, release) for release in releases]
    return pytest.mark.parametrize(fixture, asked, indirect=True, ids="-".join)


def test_lossless_tokens_are_those_of_the_stock_backend(runs: Runs) -> None:
    """Chunked prefill, prefix hits, second turns, and more requests than rows."""
    ours, stock = runs.run(), runs.run("stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


def test_two_ranks_mixed_chunks_and_retractions_change_no_token(runs: Runs) -> None:
    """The ratio of sliding slots is the user's, and leaves few of them. In Gemma 4 each rank has
    one KV head in full-attention layers, and two in the others."""
    ours, stock = runs.run("at_once"), answers(runs.run("stock"))
    found = answers(ours)
    assert found == {name: stock[name] for name in found}
    assert retractions(runs.log(runs.full_name("at_once"))) > 0
    facts = [report["facts"] for report in ours["reports"]]
    if runs.kind == "hybrid":
        assert facts[0]["states"] == facts[1]["states"]
    if runs.kind == "windows":
        slots = [one["sliding"]["slots"] for one in facts]
        assert slots == [int(0.2 * ENGINE["max_total_tokens"])] * 2


def test_a_second_turn_hits_all_of_the_first(runs: Runs) -> None:
    """A short one takes over the ring of the first, which misses the last token; with states both
    hit the one at the end of the first, which stock SGLang does, too."""
    ours, stock = (answers(runs.run(name), "cached") for name in ("", "stock"))
    assert ours["short"] == [DONOR + NEW - 1]
    if runs.kind == "hybrid":
        assert stock["short"] == stock["long"] == ours["long"] == ours["short"]
    else:
        assert ours["long"] == [DONOR + NEW]


MUTANTS = {"windows": ("one_layer", "wrong_slots"), "hybrid": ("one_layer",)}


@pytest.mark.parametrize("runs", [HERE[0], HERE[2]], indirect=True, ids="-".join)
def test_the_comparison_notices_wrong_places(runs: Runs) -> None:
    """Full-attention layers share a store; sliding layers read the slots of the others."""
    stock = answers(runs.run("stock"))
    for mutant in MUTANTS[runs.kind]:
        found = answers(runs.run(mutant))
        assert found != {name: stock[name] for name in found}, mutant


@pytest.mark.parametrize("runs", HERE, indirect=True, ids="-".join)
def test_the_reference_notices_layers_that_change_places(runs: Runs, reference: Reference) -> None:
    """Each layer is written and read with the rotation of the other one, which lossless slots do
    not show."""
    with pytest.raises(AssertionError, match="which leads by"):
        equal_answers(runs.run("swapped")["groups"], *reference(runs.kind))


@only("runs", "windows")
@pytest.mark.parametrize("family", OTHERS)
def test_families_have_the_tokens_of_the_reference(runs: Runs, tmp_path: Path, family: str) -> None:
    """SGLang compares the backends of a small gpt-oss and EXAONE 4 with lists of its own. Layers of
    both kinds have learned sinks in gpt-oss, and in Mellum a rotary embedding for each kind; stock
    SGLang keeps both models in two pools. Only the layers with a window have one in EXAONE 4."""
    wanted = reference_of(family, tmp_path).generate(recall_prompts()[0], NEW)
    (tokens,) = runs.run(family)["groups"]["new0"]["tokens"]
    assert equal_tokens(tokens, wanted) > 0.7 * NEW


def nothing_stayed(run: dict[str, Any]) -> bool:
    before, after = run["memory"]
    return bool(before == after and before["kept"] == before["locked"] == 0 < before["tokens"])


def test_nothing_stays_behind(runs: Runs) -> None:
    assert nothing_stayed(runs.run()) and nothing_stayed(runs.run("at_once"))


def test_int2_tokens_are_those_of_the_reference(codes: Runs, reference: Reference) -> None:
    """Chunked prefill, and a second turn that hits the first."""
    run = codes.run("int2")
    assert equal_answers(run["groups"], *reference(codes.kind)) > 0.7
    assert nothing_stayed(run)


def test_memory_is_planned_for_every_kind_of_layer(codes: Runs) -> None:
    """A token slot is INT2 in the full-attention layers: two KV heads of 64 channels, of 128 in
    Gemma 4. A sliding slot is float32 in two other layers, of two and four heads of 64."""
    run = codes.run("int2")
    (report,), (info,) = run["reports"], run["info"]
    facts, memory = report["facts"], info["memory"]
    width = 128 if codes.kind == "two_sizes" else 64
    assert facts["slot_bytes"] == len(codes.full) * 2 * 2 * (width // 4 + 4)
    assert memory["slot_bytes"] == facts["slot_bytes"]
    assert report["slot_store"] == (report["tokens"] + 1) * facts["slot_bytes"]
    assert facts["subtracted"] == report["window_store"] + report["transforms"] + report["scratch"]
    if codes.kind == "hybrid":
        assert info["bits_per_element"] == 2.5 and info["artifact"]["id"] is not None
        return
    sliding, heads = facts["sliding"], 4 if codes.kind == "two_sizes" else 2
    assert sliding["nbytes"] == sliding["slots"] * 2 * heads * 2 * 64 * 4
    assert run["memory"][0]["tokens"] == sliding["slots"] == memory["sliding_slots"]
    assert memory["sliding_bytes"] == sliding["nbytes"]
    told = codes.log(codes.full_name("int2"))
    assert f"INT2 KV cache: {sliding['slots']} sliding slots of" in told
    # About as many as stock SGLang would have.
    assert codes.kind == "two_sizes" or sliding["slots"] < 0.25 * report["tokens"]


@only("codes", "two_sizes", SERVED["two_sizes"])
def test_a_request_with_an_image_is_refused(codes: Runs) -> None:
    """SGLang alone would answer as if there were no image."""
    assert "is served with text only" in codes.run("int2")["image"]


@only("codes", "windows", RELEASES)
def test_fit_gpu_plans_sliding_slots_as_the_server(codes: Runs) -> None:
    """In float32 on a CPU everything but codes has twice the bytes of 16 bits, and a pass adds
    fewer tokens. A window of Gemma 3 is one token shorter in SGLang than in its configuration."""
    (report,) = codes.run("int2")["reports"]
    served = SlidingDemand(**report["facts"]["sliding_demand"])
    requests = ENGINE["max_running_requests"]
    planned = codes.planner().sliding_demand(requests)
    assert planned.token == served.token - SLOT_TABLES
    assert planned.plain_token * 2 == served.plain_token
    assert planned.sliding * 2 == served.sliding - SLIDING_TABLES
    assert planned.ratio == served.ratio
    pieces = 2 * (PIECE - CHUNK)
    assert planned.one_request - 1 - pieces == served.one_request
    assert planned.all_requests - requests - pieces == served.all_requests


@only("codes", "hybrid")
def test_fit_gpu_plans_states_as_the_server(codes: Runs) -> None:
    """The same. Without overlap a request takes three state slots in place of five."""
    (report,) = codes.run("int2")["reports"]
    served, found = StateDemand(**report["facts"]["state_demand"]), report["facts"]["states"]
    planned = codes.planner().state_demand(served.requests)
    assert planned.state * 2 == served.state == found["nbytes"] // (found["slots"] + 1)
    assert planned.plain_token * 2 == served.plain_token
    assert planned.token == served.token - SLOT_TABLES
    assert 0 < served.row - planned.row * 2 < 0.1 * served.row  # tables of a row, beside windows
    assert (planned.requests, planned.per_request, served.per_request) == (8, 5, 3)
    assert planned.ratio == served.ratio


@only("runs", "hybrid", RELEASES)
def test_there_are_as_many_states_as_requests_and_cached_prefixes_use(runs: Runs) -> None:
    """Stock SGLang gives them a share of the memory, of which 6144 tokens need little."""
    run = runs.run()
    (report,), (info,) = run["reports"], run["info"]
    slots, nbytes = run["memory"][0]["states"]
    rows, tokens = ENGINE["max_running_requests"], ENGINE["max_total_tokens"]
    assert slots == 3 * rows + tokens // TOKENS_PER_PREFIX + 1
    told = {"slots": slots, "nbytes": nbytes, "requests": rows, "draft_bytes": 0}
    assert report["facts"]["states"] == told
    assert (info["memory"]["state_slots"], info["memory"]["state_bytes"]) == (slots, nbytes)
    assert f"INT2 KV cache: {slots} state slots of" in runs.log("hybrid")
    assert runs.run("stock")["memory"][0]["states"][0] > 100 * slots


@only("runs", "hybrid", RELEASES)
def test_a_number_of_states_that_the_user_named_is_kept(runs: Runs) -> None:
    """Enough for two requests at a time, so windows are planned for two."""
    run = runs.run("few_states")
    (report,) = run["reports"]
    facts = report["facts"]
    assert run["memory"][0]["states"][0] == 7 and facts["states"]["requests"] == 2
    assert report["rows"] == 3
    assert facts["subtracted"] == report["window_store"] + report["transforms"] + report["scratch"]
    assert answers(run)["first"] == answers(runs.run("stock"))["first"]
