"""The benchmarks of every op: it is checked against its reference, then timed on the shapes of a
plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from types import ModuleType

import baselines
import cases
import checks
import roofline
import torch
from plain_rows import DecodeBaseline, rows
from results import ResultRow, row
from roofline import Heads
from timing import timed
from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention import cuda as cuda_attention
from oscar_kernels.decode_attention import launcher as triton_attention
from oscar_kernels.decode_attention.dispatch import decode_workspace_numel
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.kv_read import ReadTiles, materialize_prefix
from oscar_kernels.kv_write import cuda as cuda_write
from oscar_kernels.kv_write import launcher as triton_write
from oscar_kernels.kv_write.launcher import WriteTiles

Calls = list[Callable[[], object]]
Write = Callable[..., object]

PATHS: dict[str, ModuleType] = {"cuda": cuda_attention, "triton": triton_attention}
WRITES: dict[str, ModuleType] = {"cuda": cuda_write, "triton": triton_write}


@dataclass(frozen=True)
class OpPlan:
    """The shapes of a run.

    Attributes:
        heads: of every case.
        decode: batch and cached tokens of each request.
        drafts: of each request, verified beside a decode step; 0 for none.
        extend: new tokens over cached tokens.
        prefill, step: tokens of a write into one request, and requests of a decode step.
        layers: of a case at most; fewer where each moves many bytes.
        read: requests and tokens of each.
        replays: of every case.
    """

    heads: Heads = cases.QWEN3_8B
    decode: tuple[tuple[int, int], ...] = ((1, 8192), (1, 100_000), (16, 30_000), (64, 8192))
    extend: tuple[int, int] = (256, 100_000)
    prefill: int = 8192
    step: int = 64
    layers: int = 36
    read: tuple[tuple[int, int], ...] = ((1, 100_000), (16, 6250))
    replays: int = 30
    drafts: int = 0


FULL = OpPlan()
QUICK = OpPlan(read=((1, 100_000),), layers=12, replays=10)
DRY = OpPlan(cases.TINY, ((1, 60), (3, 25)), (5, 40), 20, 3, 2, ((1, 50), (3, 9)), 1)


@dataclass(frozen=True)
class OpBench:
    """A run of a plan.

    Attributes:
        bandwidth: bytes per second of the memory, measured before.
        note: told what is left out, and why.
    """

    plan: OpPlan
    bandwidth: float
    note: Callable[[str], None] = field(repr=False)

    def decode(self) -> Iterator[ResultRow]:
        """Time decode attention with both stages, by every path that runs here."""
        heads, checked = self.plan.heads, set[str]()
        for number, length in self.plan.decode:
            lengths = [length] * number
            moved = roofline.decode(heads, lengths)
            job = cases.attention_layers(heads, lengths, cases.layers(moved, self.plan.layers))
            for name, path in PATHS.items():
                reason = cuda_cannot_decode(job) if path is cuda_attention else None
                if reason:
                    self.note(f"decode {number} x {length}: no CUDA path: {reason}")
                    continue
                if name not in checked:
                    checks.decode(heads, path.decode_attention)
                    checked.add(name)
                calls = decode_calls(path, job, self.plan.layers)
                timing = timed(calls, replays=self.plan.replays)
                yield row("decode", f"{number} x {length}", name, timing, moved, self.bandwidth)
        if self.plan.drafts:
            yield from self.verify(self.plan.drafts)

    def verify(self, drafts: int) -> Iterator[ResultRow]:
        """Time the verification of a chain of drafts behind the same cached tokens."""
        heads = self.plan.heads
        for number, length in self.plan.decode:
            lengths, case = [length] * number, f"{number} x {length}, {drafts} drafts"
            moved = roofline.extend(heads, lengths, drafts)
            count = cases.layers(moved, self.plan.layers)
            job = cases.attention_layers(heads, lengths, count, drafts=drafts)
            for name, path in PATHS.items():
                of_cuda = path is cuda_attention
                reason = cuda_cannot_decode(job, Drafts(drafts)) if of_cuda else None
                if reason:
                    self.note(f"decode {case}: no CUDA path: {reason}")
                    continue
                if (number, length) == self.plan.decode[0]:
                    checks.verify(heads, path.decode_attention, drafts)
                calls = decode_calls(path, job, self.plan.layers, drafts=Drafts(drafts))
                timing = timed(calls, replays=self.plan.replays)
                yield row("decode", case, name, timing, moved, self.bandwidth)

    def extend(self) -> Iterator[ResultRow]:
        """Time a few new tokens over a long prefix."""
        heads, (new, length) = self.plan.heads, self.plan.extend
        checks.extend(heads)
        moved = roofline.extend(heads, [length], new)
        job = cases.attention_layers(heads, [length], 2, new=new)
        timing = timed(extend_calls(job), replays=self.plan.replays)
        yield row("extend", f"{new} over {length}", "triton", timing, moved, self.bandwidth)

    def write(self) -> Iterator[ResultRow]:
        """Time the write of a decode step, and of a prefill of one request."""
        plan = self.plan
        for name, path in WRITES.items():
            reason = (
                cuda_cannot_write(cases.write_layer(plan.heads, [0], 64))
                if path is cuda_write
                else None
            )
            if reason:
                self.note(f"write: no CUDA path: {reason}")
                continue
            checks.writing(plan.heads, path.write_kv_int2)
            for case, lengths, new, count, step in self.writes():
                yield self.timed_write(
                    name, path.write_kv_int2, case, lengths, new, count, step=step
                )

    def writes(self) -> list[tuple[str, list[int], int, int, bool]]:
        """The cases of a write: name, cached and new tokens of each request, layers, and whether it
        is a decode step."""
        plan = self.plan
        steps = [(f"step {n}", [30_000] * n, 1, plan.layers, True) for n in (1, plan.step)]
        return [*steps, (f"prefill {plan.prefill}", [0], plan.prefill, 4, False)]

    def timed_write(
        self,
        name: str,
        op: Callable[..., object],
        case: str,
        lengths: list[int],
        new: int,
        count: int,
        *,
        step: bool,
    ) -> ResultRow:
        """Time one case by one implementation."""
        heads, tokens = self.plan.heads, new * len(lengths)
        jobs = [cases.write_layer(heads, lengths, new) for _ in range(count)]
        timing = timed(write_calls(jobs, step=step, op=op), replays=self.plan.replays)
        moved = roofline.write(heads, tokens, query=step, window_rows=tokens if step else 0)
        return row("write", case, name, timing, moved, self.bandwidth)

    def read(self) -> Iterator[ResultRow]:
        """Time reading a prefix back as rows."""
        heads = self.plan.heads
        checks.reading(heads)
        for number, length in self.plan.read:
            lengths = [length] * number
            cache, batch = cases.cached_batch(heads, lengths)
            out_k, out_v = (
                cases.normal(sum(lengths), heads.num_kv_heads, heads.k_spec.head_dim) for _ in "kv"
            )
            moved = roofline.read(heads, lengths)
            timing = timed(read_calls(cache, batch, out_k, out_v), replays=self.plan.replays)
            yield row("read", f"{number} x {length}", "triton", timing, moved, self.bandwidth)

    def baseline(self) -> Iterator[ResultRow]:
        """Time decode by everything that a user could take instead, and extend by FlashInfer or
        PyTorch. What does not run here is noted and left out."""
        for one in baselines.decoders():
            try:
                yield from self._decoding(one)
            except Exception as error:  # a kernel that does not compile or run on this GPU
                self.note(f"{one.name} left out: {type(error).__name__}: {str(error)[:200]}")
        heads, baseline, (new, length) = self.plan.heads, baselines.available(), self.plan.extend
        baselines.check_extend(heads, baseline)
        calls = baseline.extend(rows(heads, [length + new], 2, new=new))
        timing = timed(calls, replays=self.plan.replays, graph=False)
        moved = roofline.attend_rows(heads, [length + new], new)
        yield row("extend", f"{new} over {length}", baseline.name, timing, moved, self.bandwidth)

    def _decoding(self, baseline: DecodeBaseline) -> Iterator[ResultRow]:
        heads = self.plan.heads
        baselines.check_decode(heads, baseline)
        for number, length in self.plan.decode:
            lengths = [length] * number
            moved = roofline.attend_rows(heads, lengths, element_bytes=baseline.element_bytes)
            made = rows(heads, lengths, cases.layers(moved, self.plan.layers))
            calls = islice(cycle(baseline.decode(made)), self.plan.layers)
            timing = timed([*calls], replays=self.plan.replays)
            case = f"{number} x {length}"
            yield row("decode", case, baseline.name, timing, moved, self.bandwidth)


def cuda_cannot_decode(job: cases.AttentionLayers, drafts: Drafts | None = None) -> str | None:
    """Why the CUDA decode kernel does not run here; `None` if it does."""
    arguments = (job.query, job.caches[0], job.batch)
    return cuda_attention.unsupported(*arguments, drafts) or cuda_attention.unbuildable(
        *arguments, drafts=drafts
    )


def cuda_cannot_write(job: cases.WriteLayer) -> str | None:
    """Why the CUDA write kernel does not run here; `None` if it does."""
    reason = cuda_write.unsupported(job.key, job.value, job.cache, job.targets)
    made = None if reason else cuda_write.variant(job.cache, job.transforms, job.targets)
    return reason if made is None else cuda_write.build_failure(made, job.key.device)


def decode_calls(
    path: ModuleType, job: cases.AttentionLayers, layers: int | None = None, **options: object
) -> Calls:
    """Calls of decode attention for every layer, as a server makes them, by a launcher that may get
    options of its own; `layers` of them if a model has more than there are caches."""
    number, q_heads, _ = job.query.shape
    requests = len(job.batch.rows)
    workspace = Workspace.allocate(
        decode_workspace_numel(job.caches[0], q_heads, requests, number // requests), cases.DEVICE
    )
    out = job.query.new_empty(number, q_heads, job.caches[0].v_spec.head_dim)
    return [
        partial(
            path.decode_attention,
            job.query,
            cache,
            job.batch,
            sm_scale=job.sm_scale,
            o_partner=job.o_partner,
            workspace=workspace,
            out=out,
            prefix_stable=True,
            same_batch=layer > 0,
            **options,
        )
        for layer, cache in enumerate(islice(cycle(job.caches), layers or len(job.caches)))
    ]


def extend_calls(job: cases.AttentionLayers) -> Calls:
    """Calls of the short extend for every layer."""
    tokens, q_heads, _ = job.query.shape
    elements = triton_attention.extend_workspace_numel(job.caches[0], q_heads, tokens)
    workspace = Workspace.allocate(elements, cases.DEVICE)
    out = job.query.new_empty(tokens, q_heads, job.caches[0].v_spec.head_dim)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=cases.DEVICE)
    return [
        partial(
            triton_attention.extend_attention,
            job.query,
            job.key,
            job.value,
            cache,
            job.batch,
            qo_indptr=job.qo_indptr,
            sm_scale=job.sm_scale,
            o_partner=job.o_partner,
            workspace=workspace,
            out=out,
            lse=lse,
        )
        for cache in job.caches
    ]


def write_calls(
    jobs: Sequence[cases.WriteLayer],
    *,
    step: bool,
    op: Callable[..., object] = triton_write.write_kv_int2,
    tiles: WriteTiles | None = None,
) -> Calls:
    """Calls that write new tokens: those of a decode step, with the query and the windows, or those
    of a prefill, into slots only."""
    return [
        partial(
            op,
            job.key,
            job.value,
            job.cache,
            job.transforms,
            job.targets,
            windows=job.windows,
            parts="all" if step else "slots",
            query=job.query if step else None,
            query_out=job.query_out if step else None,
            **({} if tiles is None else {"tiles": tiles}),
        )
        for job in jobs
    ]


def read_calls(
    cache: LayerCache,
    batch: BatchView,
    out_k: Tensor,
    out_v: Tensor,
    *,
    tiles: ReadTiles | None = None,
) -> Calls:
    """Two calls that materialise one prefix, which reads and writes more than any cache holds."""
    return [partial(materialize_prefix, cache, batch, out_k=out_k, out_v=out_v, tiles=tiles)] * 2
