"""Engines with drafts from known answers, beside Engines without drafts that gave them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache_oracle import general_set
from engine_cases import GEOMETRIES, cores, rotations
from engines import MODEL, Engines, plumbing_groups, text_tokens
from tiny_artifacts import write_folder

from oscar_zoo.artifact.writer import rotation_bytes

COUNT = 6
PLAIN = {"model_path": str(MODEL), "kv_cache_dtype": "int2", "disable_overlap_schedule": True}
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
EAGLE3 = {**BY_MODEL, "speculative_algorithm": "EAGLE3", "speculative_draft_load_format": "dummy"}
"""With random weights, so that nearly every draft is rejected."""
CHAIN = {**DRAFTS, "speculative_ngram_max_bfs_breadth": 1}
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
WINDOWS = {"OSCAR_INT2_SINK_SIZE": "16", "OSCAR_INT2_RECENT_SIZE": "32"}
LOSSLESS = {**WINDOWS, "INT2_TEST_MODE": "lossless"}
"""Variables of a mode of `int2_test_plugin`."""


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
    given_up = {"name": "given_up", "prompts": prompts, "new": 40, "abort": {"1": 7}}
    return [*plumbing_groups(ids), given_up, {**given_up, "name": "behind", "abort": {}}]


class Runs:
    """A server without drafts, and servers with drafts from its answers."""

    def __init__(self, folder: Path) -> None:
        files = {
            f"{s}.pt": rotation_bytes(general_set(s, 4, 2, 64, seed=i)) for i, s in enumerate("kv")
        }
        self.artifact = write_folder(folder / "general", files)
        self.folder, self.engines = folder, {"": Engines(folder)}

    def plain(
        self,
        name: str,
        env: dict[str, str],
        groups: list[dict[str, Any]],
        *,
        model: Path = MODEL,
        **job: Any,
    ) -> None:
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
        **job: Any,
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
        self._start(name, engine, env, drafts=stand_in, groups=groups, release=release, **job)

    def result(self, name: str) -> dict[str, Any]:
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

    def close(self) -> None:
        for engines in self.engines.values():
            engines.close()

    def _start(
        self,
        name: str,
        engine: Mapping[str, Any],
        env: dict[str, str],
        release: str = "",
        **job: Any,
    ) -> None:
        family, artifact = Path(str(engine["model_path"])).name, self.artifact
        if family in GEOMETRIES:  # a folder that has its name holds a model of it
            artifact = rotations(self.folder, GEOMETRIES[family])["orthogonal"]
        env = {**env, **cores(engine, release), "OSCAR_INT2_ROTATION_PATH": str(artifact)}
        self.engines[release].start(name, env=env, job={"engine": engine, **job})
