"""Engines with drafts from known answers, beside Engines without drafts that gave them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cache_oracle import general_set
from engine_cases import GEOMETRIES, cores, rotations
from engines import MODEL, Engines, plumbing_groups, text_tokens
from tiny_artifacts import write_folder
from torch import Tensor

from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

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

    def close(self) -> None:
        """End all of them."""
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


LAYERS, ROWS, SLOTS = 2, 4, 1200


@dataclass(frozen=True)
class DraftShape:
    """What a worker serves.

    Attributes:
        heads, group, dim: KV heads, query heads of each, channels.
        sink, recent: tokens of the windows.
        count: most drafts of a request.
        longest: tokens of a request.
        dtype, device: of the rows.
    """

    heads: int = 2
    group: int = 2
    dim: int = 32
    sink: int = 6
    recent: int = 8
    count: int = 4
    longest: int = 100
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def spec(self) -> QuantSpec:
        """Of a row of keys or of values."""
        return QuantSpec(self.dim, self.dim, 0.9, "float16")

    @property
    def slots(self) -> SlotShape:
        """Of the slots."""
        return SlotShape.alike(LAYERS, SLOTS, self.heads, self.spec, self.spec)

    @property
    def windows(self) -> WindowShape:
        """Of the windows."""
        sizes = LAYERS, ROWS, self.heads, self.dim, self.dim, self.sink, self.recent
        return WindowShape(*sizes, self.dtype, drafts=self.count)

    @property
    def config(self) -> CacheConfig:
        """Of the cache."""
        softmax = Softmax(self.dim**-0.5)
        num_q_heads = self.heads * self.group
        return CacheConfig((0, 1), num_q_heads, softmax, ROWS, self.longest, 0, self.device)

    def random(self, draw: torch.Generator) -> Token:
        """A token."""
        heads = (self.heads * self.group, self.heads, self.heads)
        rows = (torch.randn(LAYERS, n * self.dim, generator=draw) for n in heads)
        return Token(*(x.to(self.device, self.dtype) for x in rows))


@dataclass
class Token:
    """What the model computes of one token, for every layer: `[layers, heads * dim]` each."""

    q: Tensor
    k: Tensor
    v: Tensor


class Worker:
    """One cache.

    Args:
        shape: of it.
        ops: of its device.
    """

    def __init__(self, shape: DraftShape, ops: Ops, prefill: Prefill | None = None) -> None:
        device = shape.device
        self.slots_of = torch.zeros(ROWS, shape.longest, dtype=torch.int32, device=device)
        windows = WindowStore(shape.windows, device)
        for store in (windows.ring_k, windows.ring_v, windows.sink_k, windows.sink_v):
            store.fill_(float("nan"))  # what was never written must not be read
            store[:, 0] = 0  # but the dummies are
        sets = [general_set(role, LAYERS, shape.heads, shape.dim, seed=2) for role in ("k", "v")]
        heads = range(shape.heads)
        table = TransformTable.build(*sets, range(LAYERS), kv_heads=heads, device=device)
        source = SlotTable(self.slots_of, ops.pack)
        stores = SlotStore(shape.slots, device), windows
        config = replace(shape.config, piece_tokens=64 if prefill else 0)
        self.cache = Int2Cache(config, *stores, table, source, ops=ops, prefill=prefill)
        self.device = device
        self.lengths, self.free = dict[int, int](), list(range(SLOTS - 1, 0, -1))

    def integers(self, numbers: Sequence[int]) -> Tensor:
        """On the device, as engines have them."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def place(self, row: int, new: int) -> Tensor:
        """Slots of the next tokens of a row; drafts keep theirs for the next step."""
        at, own = self.lengths[row], self.slots_of[row]
        for position in range(at, at + new):
            if not own[position]:
                own[position] = self.free.pop()
        return own[at : at + new].long()

    def prefill(self, row: int, tokens: Sequence[Token]) -> None:
        """A new owner of a row begins with a prompt."""
        self.lengths[row] = 0
        written, count = self.place(row, len(tokens)), len(tokens)
        self.cache.windows.hand_out([row])
        rows, lengths = self.integers([row]), self.integers([count])
        step = StepInput("extend", rows, (row,), lengths, written, (0,), (count,))
        self.cache.begin(step)
        self.run(tokens)
        self.lengths[row] = count

    def decode(self, tokens: dict[int, Token]) -> Tensor:
        """A token of every row; its outputs."""
        written = torch.cat([self.place(row, 1) for row in tokens])
        rows = self.integers([*tokens])
        lengths = self.integers([self.lengths[row] + 1 for row in tokens])
        self.cache.begin(StepInput("decode", rows, (*tokens,), lengths, written))
        for row in tokens:
            self.lengths[row] += 1
        return self.run([*tokens.values()])

    def verify(self, rows: Sequence[int], drafts: Drafts) -> StepInput:
        """A step with drafts of every row, which is not begun."""
        written = torch.cat([self.place(row, drafts.count) for row in rows])
        lengths = self.integers([self.lengths[row] for row in rows])
        return StepInput("verify", self.integers(rows), (), lengths, written, drafts=drafts)

    def run(self, tokens: Sequence[Token]) -> Tensor:
        """Outputs of all layers, `[layers, tokens, ...]`."""
        rows = [torch.stack([getattr(one, name) for one in tokens], 1) for name in "qkv"]
        return torch.stack([self.cache.forward(i, *(x[i] for x in rows)) for i in range(LAYERS)])


PARENTS = {"tree": (-1, 0, 0, 2), "bush": (-1, 0, 1, 0), "chain": (-1, 0, 1, 2)}
"""Of each draft: the node that it hangs below."""


def masks_of(parents: Sequence[int]) -> Tensor:
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor(seen, dtype=torch.int32)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if node else ()), node]
