"""Speculative decoding inside stock SGLang on the CPU: greedy tokens are those of a server without
it, through chunked prefill, prefix hits, second turns, ten requests at once, and requests that are
retracted or given up.

In lossless mode the slots hold float32 rows, so every difference is a bug of the plumbing. With
codes alone, rows that left the window are read as codes, so also the tiers must be the same. Runs
with a bug show that each comparison can fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from architectures import write_config, write_mtp_model
from cache_oracle import general_set
from engine_cases import EXACT_STATE, GEOMETRIES, cores, model, rotations
from engines import (
    CHUNK,
    INSTALLED,
    MODEL,
    RELEASES,
    Engines,
    needs_sglang,
    plumbing_groups,
    report_of,
    text_tokens,
)
from saved_models import change_config
from tiny_artifacts import write_folder

from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines.sglang.launch.draft_flags import MTP_STEPS, mtp_words
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]


def arguments_of(flags: Iterable[str]) -> dict[str, Any]:
    """Flags of SGLang as arguments of its Engine."""
    pairs = (flag[2:].replace("-", "_").split("=") for flag in flags)
    return {name: int(text) if text.isdigit() else text for name, text in pairs}


COUNT = 6
PLAIN = {
    "model_path": str(MODEL),
    "kv_cache_dtype": "int2",
    "disable_overlap_schedule": True,
}
DRAFTS = {
    **PLAIN,
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": COUNT,
    "speculative_ngram_max_bfs_breadth": 4,
}
BY_MODEL = {
    **PLAIN,
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_attention_backend": "torch_native",
}
STANDALONE = {
    **BY_MODEL,
    "speculative_algorithm": "STANDALONE",
    "speculative_draft_model_path": str(MODEL),
}
BRANCHES = {**STANDALONE, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": COUNT}
EAGLE3 = {
    **BY_MODEL,
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_load_format": "dummy",
}
"""With random weights, so that nearly every draft is rejected."""
CHAIN = {**DRAFTS, "speculative_ngram_max_bfs_breadth": 1}
STATES = "Lfm2"
"""A family where convolutions, which keep states, and full attention take turns."""
NEXTN = {
    "speculative_draft_attention_backend": "torch_native",
    **arguments_of(mtp_words(UserFlags(), MTP_STEPS)[0]),
}
"""What `serve --drafts` gives a model with a layer for later tokens. Its weights are random."""
DRAFT_MODEL = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 2048,
    "draft_vocab_size": 2048,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FIRST_EAGLE = {"architectures": ["LlamaForCausalLMEagle"]}
"""What of it is another in a draft model of the first and second EAGLE, which reads the hidden
states of the last layer only."""
WINDOWS = {"OSCAR_INT2_SINK_SIZE": "16", "OSCAR_INT2_RECENT_SIZE": "32"}
LOSSLESS = {**WINDOWS, "INT2_TEST_MODE": "lossless"}
"""Variables of a mode of `int2_test_plugin`."""
MUTANTS = {
    "small_ring": "alone2",
    "window_of_the_first_draft": "alone2",
    "without_tree": "alone2",
    "rings_not_committed": "alone2",
    "sinks_not_committed": "alone0",
}
"""Bugs, and the request of `alone` whose tokens each changes."""


def alone(*which: int) -> list[dict[str, Any]]:
    """One request at a time: two that begin inside their sinks, and one of three chunks; or only
    those of these numbers."""
    ids = text_tokens()
    starts = [(0, 5), (40, 9), (1000, 150)]
    return [
        {"name": f"alone{i}", "prompts": [ids[at : at + count]], "new": 48}
        for i, (at, count) in enumerate(starts)
        if i in which or not which
    ]


def together() -> list[dict[str, Any]]:
    """Shared prefixes, second turns, ten requests at once, and some that are given up."""
    ids = text_tokens()
    prompts = [ids[at : at + 40] for at in (300, 2300, 4300)]
    given_up = {"name": "given_up", "prompts": prompts, "new": 60, "abort": {"1": 7}}
    return [*plumbing_groups(ids), given_up, {**given_up, "name": "behind", "abort": {}}]


def shortened(group: dict[str, Any]) -> dict[str, Any]:
    """For a model with states, whose convolutions of drafts Triton's interpreter runs: fewer new
    tokens, and prompts of one chunk where ten requests come at once."""
    prompts = group["prompts"]
    if group["name"] == "many":
        prompts = [prompt[:CHUNK] for prompt in prompts]
    return {**group, "prompts": prompts, "new": 12}


class Runs:
    """A server without drafts, and servers with drafts from its answers."""

    def __init__(self, folder: Path) -> None:
        files = {
            f"{s}.pt": rotation_bytes(general_set(s, 4, 2, 64, seed=i)) for i, s in enumerate("kv")
        }
        self.artifact = write_folder(folder / "general", files)
        self.folder, self.engines = folder, {"": Engines(folder)}
        self.of_states = rotations(folder, GEOMETRIES[STATES])["orthogonal"]

    def plain(
        self,
        name: str,
        env: dict[str, str],
        groups: list[dict[str, Any]],
        *,
        model: Path = MODEL,
        **job: Any,
    ) -> None:
        """Start a server without drafts."""
        self._start(name, {**PLAIN, "model_path": str(model)}, env, groups=groups, **job)

    def drafts(
        self,
        name: str,
        env: dict[str, str],
        groups: list[dict[str, Any]],
        *,
        of: str,
        shape: str = "tree",
        release: str = "",
        engine: Mapping[str, Any] = DRAFTS,
    ) -> None:
        """Start a server with drafts; its table of n-grams has the answers of the server `of`."""
        answers = [
            [*prompt, *tokens]
            for group in self.result(of)["groups"].values()
            for prompt, tokens in zip(group["prompts"], group["tokens"], strict=True)
        ]
        counts = str(self.folder / f"{name}.counts")
        stand_in = {"answers": answers, "shape": shape, "counts": counts}
        if release not in self.engines:
            self.engines[release] = Engines(self.folder, release)
        self._start(name, engine, env, drafts=stand_in, groups=groups, release=release)

    def result(self, name: str) -> dict[str, Any]:
        """What a server answered."""
        return self.engines[name.partition("@")[2]].result(name)

    def counts(self, name: str) -> dict[str, int]:
        """Steps, accepted and moved tokens of a server with drafts."""
        self.result(name)
        counted: dict[str, int] = json.loads((self.folder / f"{name}.counts").read_text())
        return counted

    def different(self, name: str, of: str) -> list[str]:
        """Groups of a server that have other tokens than those of the server `of`."""
        got, want = (self.result(one)["groups"] for one in (name, of))
        return [group for group in got if got[group]["tokens"] != want[group]["tokens"]]

    def _start(
        self,
        name: str,
        engine: Mapping[str, Any],
        env: dict[str, str],
        release: str = "",
        **job: Any,
    ) -> None:
        artifact = self.of_states if STATES in str(engine["model_path"]) else self.artifact
        env = {**env, **cores(engine, release), "OSCAR_INT2_ROTATION_PATH": str(artifact)}
        self.engines[release].start(name, env=env, job={"engine": engine, **job})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("drafts"))
    made.plain("lossless", LOSSLESS, [*alone(), *together()])
    windowed = write_config("gemma3_text", made.folder / "windowed")
    change_config(windowed, architectures=["Gemma3ForCausalLM"])
    hybrid = {**DRAFTS, "model_path": str(windowed)}
    both = write_config("falcon_h1", made.folder / "both")  # states beside attention, in each layer
    change_config(both, architectures=["FalconH1ForCausalLM"])
    wide = {**DRAFTS, "speculative_num_draft_tokens": 33}
    states = str(model(made.folder / STATES, STATES))
    branching = [{**one, "model_path": states} for one in (DRAFTS, BRANCHES)]
    branching.append({**DRAFTS, "model_path": str(both)})
    refused = [{"engine": engine} for engine in (hybrid, wide, *branching)]
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
            made.drafts(f"{name}_{drafts}", env, groups, of=name, engine=engine, shape="chain")
    yield made
    for engines in made.engines.values():
        engines.close()


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
    hybrid, wide, *branching = runs.result("int2")["refused"]
    assert "speculative decoding does not work with an INT2 KV cache of this model" in hybrid
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
    """Also behind prefix hits, in second turns and with ten requests at once."""
    assert set(runs.different("states_lossless_chain", "states_lossless")) <= {"given_up"}
    assert runs.different("states_int2_chain", "states_int2") == []
    assert runs.different("states_int2_model", "states_int2") == []
    counts = runs.counts("states_lossless_chain")
    assert counts["accepted"] > 2 * counts["steps"]


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
    runs.drafts(states, env, few, of="states_int2", release=release, engine=engine, shape="chain")
    assert runs.different(states, "states_int2") == []
