"""Speculative decoding inside stock SGLang on the CPU: greedy tokens are those of a server without
it, through chunked prefill, prefix hits, second turns, ten requests at once, and requests that are
retracted or given up.

In lossless mode the slots hold float32 rows, so every difference is a bug of the plumbing. With
codes alone, rows that left the window are read as codes, so also the tiers must be the same. Runs
with a bug show that each comparison can fail.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from architectures import write_config, write_mtp_model
from draft_runs import (
    BRANCHES,
    CHAIN,
    COUNT,
    DRAFT_MODEL,
    DRAFTS,
    EAGLE3,
    LOSSLESS,
    PLAIN,
    STANDALONE,
    WINDOWS,
    Runs,
    alone,
    together,
)
from engine_cases import EXACT_STATE, model
from engines import CHUNK, INSTALLED, RELEASES, needs_sglang, report_of
from tiny_models import change_config

from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.serving.prepared import MTP_STEPS, mtp_words

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]


def arguments_of(flags: Iterable[str]) -> dict[str, Any]:
    """Flags of SGLang as arguments of its Engine."""
    pairs = (flag[2:].replace("-", "_").split("=") for flag in flags)
    return {name: int(text) if text.isdigit() else text for name, text in pairs}


STATES = "Lfm2"
"""A family where convolutions, which keep states, and full attention take turns."""
NEXTN = {
    "speculative_draft_attention_backend": "torch_native",
    **arguments_of(mtp_words(UserFlags(), MTP_STEPS)[0]),
}
"""What `serve --drafts` gives a model with a layer for later tokens. Its weights are random."""
FIRST_EAGLE = {"architectures": ["LlamaForCausalLMEagle"]}
"""What of it is another in a draft model of the first and second EAGLE, which reads the hidden
states of the last layer only."""
MUTANTS = {
    "small_ring": "alone2",
    "window_of_the_first_draft": "alone2",
    "without_tree": "alone2",
    "rings_not_committed": "alone2",
    "sinks_not_committed": "alone0",
}
"""Bugs, and the request of `alone` whose tokens each changes."""


def shortened(group: dict[str, Any]) -> dict[str, Any]:
    """For a model with states, whose convolutions of drafts Triton's interpreter runs: fewer new
    tokens, and prompts of one chunk where ten requests come at once."""
    prompts = group["prompts"]
    if group["name"] == "many":
        prompts = [prompt[:CHUNK] for prompt in prompts]
    return {**group, "prompts": prompts, "new": 12}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("drafts"))
    made.plain("lossless", LOSSLESS, [*alone(), *together()])
    both = write_config("falcon_h1", made.folder / "both")  # states beside attention, in each layer
    change_config(both, architectures=["FalconH1ForCausalLM"])
    wide = {**DRAFTS, "speculative_num_draft_tokens": 33}
    states = str(model(made.folder / STATES, STATES))
    branching = [{**one, "model_path": states} for one in (DRAFTS, BRANCHES)]
    branching.append({**DRAFTS, "model_path": str(both)})
    refused = [{"engine": engine} for engine in (wide, *branching)]
    made.plain("int2", WINDOWS, alone(), refused=refused)
    made.drafts("tree", LOSSLESS, [*alone(), *together()], of="lossless")
    made.drafts("chain", LOSSLESS, alone(), of="lossless", shape="chain")
    made.drafts("int2_tree", WINDOWS, alone(), of="int2")
    for mutant, request in MUTANTS.items():
        env = {**WINDOWS, "INT2_TEST_MUTANT": mutant}
        made.drafts(mutant, env, [x for x in alone() if x["name"] == request], of="int2")
    ends = alone(0, 2)  # from the first sink on, and with all of the windows in the prompt
    for name, engine in (("ranks", DRAFTS), ("standalone_ranks", STANDALONE)):
        made.drafts(name, WINDOWS, ends, of="int2", engine={**engine, "tp_size": 2})
    made.drafts("standalone", WINDOWS, ends, of="int2", engine=STANDALONE)
    made.drafts("itself", LOSSLESS, ends, of="lossless", engine=STANDALONE)
    retracting = {**LOSSLESS, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
    crowd = together()[4:]  # ten requests at once, and those that are given up
    made.drafts("branches", retracting, [*alone(2), *crowd], of="lossless", engine=BRANCHES)
    for name, family in (("eagle3", DRAFT_MODEL), ("eagle", {**DRAFT_MODEL, **FIRST_EAGLE})):
        (made.folder / name).mkdir()
        (made.folder / name / "config.json").write_text(json.dumps(family))
        eagle = {**EAGLE3, "speculative_draft_model_path": str(made.folder / name)}
        eagle["speculative_algorithm"] = name.upper()
        made.drafts(name, WINDOWS, ends, of="int2", engine=eagle)
    mtp = write_mtp_model("glm4_moe", made.folder / "mtp")
    made.plain("mtp", WINDOWS, ends, model=mtp)
    nextn = {**PLAIN, **NEXTN, "model_path": str(mtp)}
    made.drafts("nextn", WINDOWS, ends, of="mtp", engine=nextn)
    few = [shortened(group) for group in (*alone(), *together())]
    of_states = made.folder / STATES
    for mode, env, groups in (("lossless", LOSSLESS, few), ("int2", WINDOWS, few[:3])):
        name, env = f"states_{mode}", {**env, **EXACT_STATE}
        made.plain(name, env, groups, model=of_states)
        engines = {"chain": CHAIN} if mode == "lossless" else {"chain": CHAIN, "model": STANDALONE}
        for drafts, engine in engines.items():
            engine = {**engine, "model_path": str(of_states)}
            made.drafts(f"{name}_{drafts}", env, groups, of=name, engine=engine, shape="chains")
    env = {**LOSSLESS, **EXACT_STATE, "INT2_TEST_MUTANT": "several_chains"}
    several: dict[str, Any] = {"engine": {**CHAIN, "model_path": str(of_states)}, "shape": "chains"}
    made.drafts("several_chains", env, few[1:2], of="states_lossless", **several)
    yield made
    made.close()


def test_lossless_tokens_are_those_of_plain_greedy_decoding(runs: Runs) -> None:
    assert set(runs.different("tree", "lossless")) <= {"given_up"}
    got, want = (runs.result(one)["groups"]["given_up"] for one in ("tree", "lossless"))
    assert got["ended"] == want["ended"] == ["length", "abort", "length"]
    assert [got["tokens"][i] for i in (0, 2)] == [want["tokens"][i] for i in (0, 2)]
    assert runs.different("chain", "lossless") == []
    for shape in ("tree", "chain"):
        counts = runs.counts(shape)
        assert counts["accepted"] > 1.5 * counts["steps"]
        assert (counts["moved"] > 20) == (shape == "tree")


def test_int2_tokens_and_log_probabilities_are_those_of_plain_decoding(runs: Runs) -> None:
    assert runs.different("int2_tree", "int2") == []
    for name, group in runs.result("int2")["groups"].items():
        (got,), (want,) = runs.result("int2_tree")["groups"][name]["logprobs"], group["logprobs"]
        assert got == pytest.approx(want, abs=2e-3)


def test_what_drafts_do_not_work_with_is_refused_before_weights_are_loaded(runs: Runs) -> None:
    wide, *branching = runs.result("int2")["refused"]
    assert "--speculative-num-draft-tokens does not work with an INT2 KV cache" in wide
    for said in branching:
        assert "a tree of drafts does not work with an INT2 KV cache of this model" in said
    assert len(branching) == 3


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_bug_changes_tokens(runs: Runs, mutant: str) -> None:
    assert runs.different(mutant, "int2") == [MUTANTS[mutant]]


@pytest.mark.parametrize(
    ("name", "of"),
    [("standalone", "int2"), ("eagle3", "int2"), ("eagle", "int2"), ("nextn", "mtp")],
)
def test_drafts_of_a_model_are_verified_as_a_chain(runs: Runs, name: str, of: str) -> None:
    assert runs.different(name, of) == []


def test_drafts_of_the_model_itself_are_accepted(runs: Runs) -> None:
    """Three drafts a step of a draft model that is the model, over exact rows. SGLang gives it all
    tokens of a prompt but the first, so it may guess another token now and then."""
    assert runs.different("itself", "lossless") == []
    groups = runs.result("itself")["groups"].values()
    tokens = sum(len(one["tokens"][0]) for one in groups)
    assert 3.6 < tokens / sum(one["steps"][0] for one in groups) <= 4


def test_drafts_of_a_model_are_verified_as_a_tree_while_requests_are_retracted(runs: Runs) -> None:
    assert set(runs.different("branches", "lossless")) <= {"given_up"}
    counts = runs.counts("branches")
    assert counts["accepted"] > 2 * counts["steps"] and counts["moved"] > 100


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("standalone", 4 * 2 * 2 * 64 * 4),
        ("eagle3", 1 * 2 * 64 * 4),
        ("eagle", 1 * 2 * 64 * 4),
        ("nextn", 1 * 2 * 2 * 64 * 4),
        ("tree", 0),
    ],
)
def test_a_token_slot_counts_the_cache_of_the_draft_model(runs: Runs, name: str, each: int) -> None:
    """Layers, KV heads, K and V of 64 channels, in float32."""
    facts = report_of(runs.result(name))["facts"]
    assert facts["draft_bytes"] == each


def test_a_model_with_states_verifies_a_chain(runs: Runs) -> None:
    """Also behind prefix hits, in second turns and with ten requests at once. SGLang's table of
    n-grams gives several chains, whatever it is asked for."""
    assert set(runs.different("states_lossless_chain", "states_lossless")) <= {"given_up"}
    assert runs.different("states_int2_chain", "states_int2") == []
    assert runs.different("states_int2_model", "states_int2") == []
    counts = runs.counts("states_lossless_chain")
    assert counts["accepted"] > 1.3 * counts["steps"] and counts["moved"] == 0
    assert runs.different("several_chains", "states_lossless") == ["alone1"]


def test_states_behind_drafts_are_counted(runs: Runs) -> None:
    """One for each draft of each request, and for the padding request."""
    facts = report_of(runs.result("states_int2_chain"))["facts"]["states"]
    plain = report_of(runs.result("states_int2"))["facts"]["states"]
    state = plain["nbytes"] // (plain["slots"] + 1)
    assert facts == {**plain, "draft_bytes": COUNT * (facts["requests"] + 1) * state}


@pytest.mark.parametrize("name", ["ranks", "standalone_ranks"])
def test_two_ranks_verify_the_same(runs: Runs, name: str) -> None:
    assert runs.different(name, "int2") == []


@pytest.mark.parametrize("release", [one for one in RELEASES if one != INSTALLED])
def test_other_releases_verify_the_same(runs: Runs, release: str) -> None:
    tree, chain = f"tree@{release}", f"standalone@{release}"
    runs.drafts(tree, LOSSLESS, alone(), of="lossless", release=release)
    runs.drafts(chain, WINDOWS, alone(0, 2), of="int2", release=release, engine=STANDALONE)
    assert runs.different(tree, "lossless") == []
    assert runs.counts(tree)["moved"] > 20
    assert runs.different(chain, "int2") == []
    if release == "0.5.17":
        return  # it allocates the states behind drafts on a GPU, whatever the device is
    states, engine = f"states@{release}", {**CHAIN, "model_path": str(runs.folder / STATES)}
    few = [shortened(group) for group in alone()]
    env = {**WINDOWS, **EXACT_STATE}
    runs.drafts(states, env, few, of="states_int2", release=release, engine=engine, shape="chains")
    assert runs.different(states, "states_int2") == []
