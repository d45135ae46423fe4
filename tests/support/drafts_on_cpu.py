"""Speculative decoding of stock SGLang on a CPU: what stands in for its functions that need a GPU.

Each of them does in plain torch what SGLang's kernel of that name does. The table of n-grams, which
would be compiled, gives drafts from known answers in its place: some right tokens, among wrong
ones, in a chain, in one of two chains, or somewhere in a random tree. Nothing of ours is replaced.
"""

import importlib
import json
import random
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

STATES = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
KNOWN = 8
"""Tokens by which a place in a known answer is found."""


def install(answers: Sequence[Sequence[int]], shape: str, counts: str = "") -> None:
    """Make SGLang verify drafts on a CPU.

    Args:
        shape: `chain`, `chains` or `tree`.
    """
    library, part = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.speculative")
    library.__path__ = []
    part.reconstruct_indices_from_tree_mask = links_of_trees  # type: ignore[attr-defined]
    library.speculative = part  # type: ignore[attr-defined]
    sys.modules.update({"sgl_kernel": library, "sgl_kernel.speculative": part})
    for tokens in answers:
        for at in range(1, len(tokens)):
            Table.known[tuple(tokens[max(0, at - KNOWN) : at])] = list(tokens[at:])
    Table.shape = shape
    Moves.place = Path(counts) if counts else None
    for module, name, stand_in in (
        ("sglang.srt.mem_cache.allocation", "assign_req_to_token_pool_func", note_slots),
        ("sglang.kernels.ops.speculative.cache_locs", "assign_extend_cache_locs_func", slots_of),
        ("sglang.srt.speculative.eagle_utils", "verify_tree_greedy_func", accept),
        ("sglang.srt.speculative.spec_utils", "move_accept_tokens_to_target_kvcache", Moves.move),
        (STATES, "fused_mamba_state_scatter_with_mask", keep_states),
        (STATES, "fused_conv_window_scatter_with_mask", keep_states),
        ("sglang.srt.speculative.cpp_ngram.ngram_corpus", "NgramCorpus", Table),
    ):
        loaded = importlib.import_module(module)
        assert hasattr(loaded, name), (module, name)
        setattr(loaded, name, stand_in)
    draft_model_backends()
    torch.cuda.synchronize = lambda *_: None  # a layer for later tokens calls it without asking


def keep_states(
    kept: Tensor, made: Tensor, slots: Tensor, steps: Tensor, rows: Tensor | None = None
) -> None:
    """The state behind the last accepted draft of every request, which goes to its slot.

    Args:
        kept: `[layers, slots, ...]`.
        made: `[layers, requests, drafts, ...]`.
        steps: drafts of every request; -1 for none.
        rows: of `made`, for every request; the first ones without it.
    """
    places = range(len(slots)) if rows is None else rows.tolist()
    for row, slot, step in zip(places, slots.tolist(), steps.tolist(), strict=True):
        if step >= 0:
            kept[:, slot] = made[:, row, step]


def links_of_trees(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    requests: int,
    count: int,
) -> None:
    """Positions of drafts, and the first child and the next sibling of each."""
    trees = mask.view(requests, count, count)
    for b in range(requests):
        first: dict[int, int] = {}
        for node in reversed(range(count)):
            parents = trees[b, node, :node].nonzero().flatten().tolist()
            positions[b * count + node] = lengths[b] + len(parents)
            index[b, node], child[b, node] = b * count + node, first.get(node, -1)
            sibling[b, node] = first.get(parents[-1], -1) if parents else -1
            if parents:
                first[parents[-1]] = node


def note_slots(
    rows: Tensor, table: Tensor, begins: Tensor, ends: Tensor, slots: Tensor, count: int
) -> None:
    """Write new slots of the first `count` requests, one request after the other, into their rows
    of `table`, from the tokens `begins` on up to the tokens `ends`."""
    at = 0
    places = zip(*(x[:count].tolist() for x in (rows, begins, ends)), strict=True)
    for row, begin, end in places:
        table[row, begin:end] = slots[at : at + end - begin].to(table.dtype)
        at += end - begin


def slots_of(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    draft_token_num: int,
    **_: Any,
) -> Tensor:
    at = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], at].flatten().long()


def accept(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root of each tree on, the child that is what the target says."""
    for b in range(len(candidates)):
        node, taken = 0, 0
        accept_index[b, 0] = retrieve_index[b, 0]
        while taken + 1 < accept_index.shape[1]:
            wanted, child = int(target_predict[b, node]), int(retrieve_next_token[b, node])
            while child != -1 and int(candidates[b, child]) != wanted:
                child = int(retrieve_next_sibling[b, child])
            if child == -1:
                break
            predicts[retrieve_index[b, node]] = wanted
            node, taken = child, taken + 1
            accept_index[b, taken] = retrieve_index[b, node]
        accept_token_num[b] = taken
        predicts[retrieve_index[b, node]] = target_predict[b, node]
    return predicts, accept_index, accept_token_num


class Moves:
    """The slots that accepted drafts are copied to and from, and how many there were."""

    counts: ClassVar[dict[str, int]] = {"steps": 0, "accepted": 0, "moved": 0}
    place: Path | None = None

    @classmethod
    def move(cls, batch: Any, accept_index: Tensor, correct: Tensor, allocator: Any) -> None:
        target, source = torch.zeros(2, accept_index.numel(), dtype=torch.int64)
        at = 0
        for b, right in enumerate(correct.tolist()):
            row, length = int(batch.req_pool_indices[b]), int(batch.seq_lens[b])
            for depth in range(right + 1):
                target[at] = batch.req_to_token_pool.req_to_token[row, length + depth]
                source[at] = batch.out_cache_loc[accept_index[b, depth]]
                at += 1
        cls.counts["steps"] += len(correct)
        cls.counts["accepted"] += at
        cls.counts["moved"] += int((target != source).sum())
        if cls.place is not None:
            cls.place.write_text(json.dumps(cls.counts))
        allocator.get_kvcache().move_kv_cache(target, source)


class Table:
    """In place of the table of n-grams."""

    known: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    shape = "tree"

    def __init__(self, **given: Any) -> None:
        self.count, self.draw = given["draft_token_num"], random.Random(7)

    def batch_get(self, _: Any, texts: Sequence[Sequence[int]], __: Any) -> tuple[Any, Any]:
        make = self._chains if self.shape == "chains" else self._drafts
        made = [make(text) for text in texts]
        masks = np.concatenate([seen_by(parents).flatten() for _, parents in made])
        return np.array([tokens for tokens, _ in made], np.int64).flatten(), masks

    def _right(self, text: Sequence[int], most: int) -> list[int]:
        return self.known.get(tuple(text[-KNOWN:]), [])[: self.draw.choice([0, 1, 2, most])]

    def _drafts(self, text: Sequence[int]) -> tuple[list[int], list[int]]:
        """Right tokens below each other, and wrong ones anywhere."""
        draw, count, chain = self.draw, self.count, self.shape == "chain"
        right = self._right(text, count)
        tokens, parents, end = [text[-1]], [-1], 0
        while len(tokens) < count:
            if right and (chain or draw.random() < 0.6):
                parents.append(end)
                tokens.append(right.pop(0))
                end = len(tokens) - 1
            else:
                parents.append(len(tokens) - 1 if chain else draw.randrange(len(tokens)))
                tokens.append(draw.randrange(1, 2048))
        return tokens, parents

    def _chains(self, text: Sequence[int]) -> tuple[list[int], list[int]]:
        """What SGLang's table gives where every token has one that follows: a chain for each of two
        beginnings, level by level, and zeros below the first token."""
        draw, count = self.draw, self.count
        right = self._right(text, count)
        wrong = [draw.randrange(1, 2048) for _ in range(draw.randrange(count))]
        both = [right, wrong] if draw.random() < 0.5 else [wrong, right]
        tokens, parents, ends = [text[-1]], [-1], [0, 0]
        for level in range(count):
            for index, one in enumerate(both):
                if level < len(one) and len(tokens) < count:
                    parents.append(ends[index])
                    tokens.append(one[level])
                    ends[index] = len(tokens) - 1
        missing = count - len(tokens)
        return tokens + [0] * missing, parents + [0] * missing

    def __getattr__(self, name: str) -> Any:
        """What the table learns is of no use here."""
        if name in ("batch_put", "synchronize", "erase_match_state", "reset"):
            return lambda *_, **__: None
        raise AttributeError(name)


def seen_by(parents: Sequence[int]) -> Any:
    mask = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def draft_model_backends() -> None:
    """Let a draft model run with plain attention, which SGLang has on GPUs alone."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    # SGLang has this kernel in Triton as well, for other devices.
    if hasattr(eagle_utils, "build_tree_kernel_efficient_func"):  # 0.5.23
        from sglang.kernels.ops.speculative import spec_tree

        eagle_utils.build_tree_kernel_efficient_func = spec_tree.sgl_build_tree_kernel_triton
    else:
        eagle_utils.sgl_build_tree_kernel_efficient = eagle_utils.sgl_build_tree_kernel_triton

    class Step(TorchNativeAttnBackend):  # type: ignore[misc]
        """One step: every branch sees the tokens in front of the drafts and its own ones."""

        def __init__(self, runner: Any, branches: int, steps: int, step: int) -> None:
            super().__init__(runner)
            self.branches, self.steps, self.step = branches, steps, step

        def forward_decode(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, **_: Any
        ) -> Tensor:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
            keys, values = (
                get(layer.layer_id)
                for get in (
                    self.token_to_kv_pool.get_key_buffer,
                    self.token_to_kv_pool.get_value_buffer,
                )
            )
            query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
            outputs = []
            for index, one in enumerate(query):
                row, length = (x[index // self.branches] for x in (rows, lengths))
                own = length + index % self.branches * self.steps
                table = self.req_to_token_pool.req_to_token[row]
                slots = torch.cat([table[:length], table[own : own + self.step + 1]]).long()
                outputs.append(
                    torch.nn.functional.scaled_dot_product_attention(
                        one[:, None], keys[slots].transpose(0, 1), values[slots].transpose(0, 1),
                        scale=layer.scaling, enable_gqa=True,
                    )[:, 0]
                )  # fmt: skip
            return torch.stack(outputs).flatten(1)

    def steps(self: Any) -> Any:
        count = self.speculative_num_steps
        made = [Step(self.draft_model_runner, self.topk, count, i) for i in range(count - 1)]

        def begin(batch: Any) -> None:
            for one in made:
                one.init_forward_metadata(batch)

        return types.SimpleNamespace(attn_backends=made, init_forward_metadata=begin)

    DraftBackendFactory.create_decode_backend = steps
    DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(
        self.draft_model_runner
    )
