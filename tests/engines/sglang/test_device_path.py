"""From SGLang's batches to the kernels: prefill with padding, eager decode, and decode through
views a graph holds.

Everything is real but the engine around it (its batch and model are plain objects) and FlashInfer;
kernels are interpreted without a GPU. The plain executor says what is right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cache_oracle import general_set
from torch import Tensor

from oscar_kernels.spec import QuantSpec
from oscar_zoo.engines.sglang import device_path
from oscar_zoo.engines.sglang.compat import radix_attention
from oscar_zoo.engines.sglang.device_path import DevicePath
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.step import Step, StepRequest
from oscar_zoo.runtime.torch_executor import TorchExecutor
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

HEADS, GROUP, DIM, SINK, RECENT, ROWS, SLOTS, LONGEST = 2, 2, 32, 4, 8, 4, 200, 100
SPEC = QuantSpec(DIM, DIM, 0.9, "float16")
LAYER = SimpleNamespace(
    layer_id=7,
    scaling=DIM**-0.5,
    tp_q_head_num=HEADS * GROUP,
    tp_k_head_num=HEADS,
    qk_head_dim=DIM,
    v_head_dim=DIM,
)


class Worker:
    """A device path and a plain executor, fed the same tokens."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, scalings: tuple[float, ...] = (LAYER.scaling,)
    ) -> None:
        layers = [SimpleNamespace(**{**vars(LAYER), "scaling": one}) for one in scalings]
        monkeypatch.setattr(radix_attention, "attention_layers", lambda model: layers)
        monkeypatch.setattr(radix_attention, "write_location", lambda location: location)
        monkeypatch.setattr(device_path, "SCRATCH_TOKENS", 16)
        sets = [general_set(role, 1, HEADS, DIM, seed=2) for role in ("k", "v")]
        self.table = TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device="cpu")
        self.stores = [self._stores() for _ in range(2)]
        slots, side = self.stores[0]
        pool = SimpleNamespace(slots=slots, side=side, device="cpu", start_layer=7)
        self.slots_of = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots_of),
            model=None,
            model_config=SimpleNamespace(context_len=LONGEST),
        )
        self.begun: list[tuple[list[int], list[int], list[int]]] = []
        self.path = DevicePath(runner, pool, self.table, self.begin)
        self.plain = TorchExecutor(*self.stores[1], self.table)
        self.next, self.random = 1, torch.Generator().manual_seed(1)

    def begin(self, rows: list[int], prefixes: list[int], ends: list[int]) -> None:
        self.begun.append((rows, prefixes, ends))
        for _, side in self.stores:
            side.begin(dict(zip(rows, prefixes, strict=True)))

    @staticmethod
    def _stores() -> tuple[SlotStore, WindowStore]:
        side = WindowStore(
            WindowShape(1, ROWS, HEADS, DIM, DIM, SINK, RECENT, torch.float32), "cpu"
        )
        return SlotStore(SlotShape(1, SLOTS, HEADS, SPEC, SPEC), "cpu"), side

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = (HEADS * GROUP, HEADS, HEADS)
        q, k, v = (torch.randn(tokens, n * DIM, generator=self.random) for n in heads)
        return q, k, v

    def place(self, row: int, prefix: int, new: int) -> Tensor:
        written = torch.arange(self.next, self.next + new)
        self.next += new
        self.slots_of[row, prefix : prefix + new] = written.int()
        return written

    def expected(
        self, lengths: dict[int, tuple[int, int]], out: Tensor, rows: Any, *, decode: bool
    ) -> Tensor:
        """By the plain executor; `lengths` row -> cached and new tokens."""
        requests = []
        for row, (prefix, new) in lengths.items():
            (cover,) = self.stores[1][1].coverage([row], [prefix + decode])
            requests.append(
                StepRequest(row, prefix, new, cover, self.slots_of[row, : cover.length].long())
            )
        run = self.plain.decode if decode else self.plain.extend
        q, k, v = (x[: len(out)].unflatten(1, (-1, DIM)) for x in rows)
        return run(0, q, k, v, Step(tuple(requests), out, decode), scaling=LAYER.scaling).flatten(1)


def batch(rows: Tensor, lengths: Tensor, written: Tensor, **extend: Any) -> Any:
    mode = SimpleNamespace(is_extend=lambda: bool(extend))
    return SimpleNamespace(
        req_pool_indices=rows, seq_lens=lengths, out_cache_loc=written, forward_mode=mode, **extend
    )


def prefill(worker: Worker, new: dict[int, int], padding: int) -> None:
    written = torch.cat([worker.place(row, 0, n) for row, n in new.items()])
    rows = worker.rows(len(written) + padding)
    lengths = {"extend_prefix_lens_cpu": [0] * len(new), "extend_seq_lens_cpu": list(new.values())}
    padded = torch.cat([written, torch.zeros(padding, dtype=torch.int64)])
    worker.path.start(
        batch(torch.tensor(list(new)), torch.tensor(list(new.values())), padded, **lengths)
    )
    got = worker.path.forward(*rows, LAYER)
    expected = worker.expected({row: (0, n) for row, n in new.items()}, written, rows, decode=False)
    torch.testing.assert_close(got[: len(written)], expected, atol=1e-5, rtol=1e-4)
    assert not got[len(written) :].any() and len(got) == len(rows[0])


def test_prefill_decode_and_a_graphs_views(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    prefill(worker, {1: 21, 3: 9}, padding=3)
    assert worker.begun == [([1, 3], [0, 0], [21, 9])]
    lengths = {1: 21, 3: 9}
    # The buffers of a graph for three requests: two real ones, and one of padding in row 0.
    held = torch.tensor([1, 3, 0]), torch.tensor([22, 10, 1]), torch.zeros(3, dtype=torch.int64)
    for step in range(3):
        for at, row in enumerate(lengths):
            held[2][at] = worker.place(row, lengths[row], 1)
            held[1][at] = lengths[row] + 1
        worker.path.start(
            batch(*held), refill_only=step > 0
        )  # later steps only fill what the first one's views show
        rows = worker.rows(3)
        got = worker.path.forward(*rows, LAYER)
        asked = {row: (n, 1) for row, n in lengths.items()}
        expected = worker.expected(asked, held[2][:2], rows, decode=True)
        torch.testing.assert_close(got[:2], expected, atol=1e-4, rtol=1e-3)
        assert got.isfinite().all()
        lengths = {row: n + 1 for row, n in lengths.items()}


def test_layers_must_share_their_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="different scaling"):
        Worker(monkeypatch, scalings=(0.1, 0.2))


def test_nothing_runs_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    with pytest.raises(RuntimeError, match="without metadata"):
        worker.path.forward(*worker.rows(1), LAYER)
