"""The cache with the references of the kernels against the float64 oracle, over the lengths
where tiers begin and end."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from cache_oracle import Cut, expected, general_set, matrices, near_a_tie
from int2_test_plugin import exact, mutants, reads
from tiny_artifacts import rotation
from torch import Tensor

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.runtime.dispatch import REFERENCES
from oscar_zoo.runtime.engine import CacheConfig, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

HEADS, GROUP, DIM, SINK, RECENT = 2, 3, 64, 4, 6
SPEC = QuantSpec(
    DIM, DIM // 2, 0.9, "float32"
)  # 16-bit scales round too, and have ties of their own
SCALE = DIM**-0.5
ORTHOGONAL = rotation("qqt_r_h_pbr", spread=0.5), rotation("sst_r_h_pbr", spread=0.5)
GENERAL = tuple(general_set(role, 1, HEADS, DIM, seed=3) for role in ("k", "v"))


PLAIN = Softmax(SCALE)


@dataclass
class Machine:
    """One layer of a worker: a cache over its own stores, and requests that come and go in
    rows."""

    sets: tuple[RotationSet, ...] = ORTHOGONAL
    dtype: torch.dtype = torch.float32
    sink: int = SINK
    recent: int = RECENT
    mode: str = "int2"
    mutant: str = ""
    softmax: Softmax = PLAIN
    specs: tuple[QuantSpec, QuantSpec] = (SPEC, SPEC)
    device: str = "cpu"
    next_slot: int = 1
    slots_of: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dims = self.specs[0].head_dim, self.specs[1].head_dim
        shape = WindowShape(1, 4, HEADS, *dims, self.sink, self.recent, self.dtype)
        self.windows = WindowStore(shape, self.device)
        for buffer in self.windows.buffers():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        make = exact.ExactStore if self.mode == "lossless" else SlotStore
        self.store = make(SlotShape.alike(1, 400, HEADS, *self.specs), self.device)
        table = TransformTable.build(
            *self.sets, range(1), kv_heads=range(HEADS), device=self.device
        )
        if self.mutant == "partner_is_forward":
            table = mutants.partner_is_forward(table)
        self.reads = Counter(reads.NOTHING)
        ops = {"int2": REFERENCES, "lossless": exact.EXACT, "poison": exact.POISONED}[self.mode]
        ops = mutants.broken(reads.counting(ops, self.reads), self.mutant)
        self.slot_table = torch.zeros(4, 100, dtype=torch.int32, device=self.device)
        config = CacheConfig((0,), HEADS * GROUP, self.softmax, 3, 100, 0, self.device)
        pack = partial(ops.pack, self.slot_table)
        self.cache = Int2Cache(config, self.store, self.windows, table, pack, ops=ops, prefill=None)

    def begin(self, row: int, prefix_of: int | None = None, prefix: int = 0) -> None:
        """A new owner of `row`, whose first `prefix` tokens lie in the slots of an earlier
        request."""
        self.slots_of[row] = [] if prefix_of is None else self.slots_of[prefix_of][:prefix]
        self.windows.begin({row: prefix})

    def step(
        self, rows: list[int], q: Tensor, k: Tensor, v: Tensor, new: list[int], *, decode: bool
    ) -> Tensor:
        """One step, in which the requests in `rows` bring `new` tokens."""
        prefixes, own = [len(self.slots_of[row]) for row in rows], list[int]()
        for row, count in zip(rows, new, strict=True):
            slots = range(self.next_slot, self.next_slot + count)
            self.next_slot += count
            self.slots_of[row] += slots
            own += slots
            known = torch.tensor(self.slots_of[row], dtype=torch.int32)
            self.slot_table[row, : len(known)] = known.to(self.device)
        step = StepInput(
            "decode" if decode else "extend",
            torch.tensor(rows, device=self.device),
            tuple(rows),
            torch.tensor([n + 1 for n in prefixes], device=self.device),
            torch.tensor(own, device=self.device),
            *(() if decode else (tuple(prefixes), tuple(new))),
        )
        self.cache.begin(step)
        assert self.cache.batch is not None and self.cache.batch.num_tokens == sum(new)
        out = self.cache.forward(0, *(x.flatten(1) for x in (q, k, v)), self.softmax.sinks)
        return out.view(*q.shape[:2], -1)

    def ran(self, given: tuple[Tensor, ...], cut: Cut) -> Tensor:
        """All outputs of a request that is alone."""
        self.begin(1)
        return self.run(1, *given, cut)

    def run(self, row: int, q: Tensor, k: Tensor, v: Tensor, cut: Cut) -> Tensor:
        """All steps of a request; outputs of the positions from `cut.prefix` on."""
        out, at = [], cut.prefix
        for size, decode in [(size, False) for size in cut.chunks] + [(1, True)] * cut.decode:
            part = slice(at, at + size)
            out.append(self.step([row], q[part], k[part], v[part], [size], decode=decode))
            at += size
        return torch.cat(out)


def tokens(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v whose codes are the same whatever rounds them: rows on a tie are dropped."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(number, HEADS * GROUP, DIM, generator=g)
    k, v = torch.randn(2, 2 * number + 20, HEADS, DIM, generator=g).unbind()
    k = k + 0.5
    for sets in (ORTHOGONAL, GENERAL):
        pair_k, pair_v = (matrices(s, 0, HEADS) for s in sets)
        k, v = k[~near_a_tie(k, pair_k, SPEC)], v[~near_a_tie(v, pair_v, SPEC)]
    return q, k[:number], v[:number]


def away(machine: Machine, out: Tensor, given: tuple[Tensor, ...], cut: Cut) -> float:
    """How far outputs are from those of the oracle."""
    pairs = [matrices(s, 0, HEADS) for s in machine.sets]
    like = {key: getattr(machine, key) for key in ("specs", "sink", "recent", "dtype", "softmax")}
    want = expected(*given, cut, *pairs, **like)
    return float((out.double().cpu() - want).abs().max())


CUTS = [
    Cut([1], 2),
    Cut([SINK - 1], 8),
    Cut([SINK], 2),
    Cut([RECENT], 3),
    Cut([RECENT + 1], 3),
    Cut([SINK + RECENT], 3),
    Cut([5, 7, 3], 4),
    Cut([1, 1, 1, 9], 2),
    Cut([30], 14),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("sets", [ORTHOGONAL, GENERAL], ids=["orthogonal", "general"])
def test_outputs_are_those_of_the_oracle(cut: Cut, sets: tuple[RotationSet, ...]) -> None:
    machine, given = Machine(sets), tokens(cut.total)
    assert away(machine, machine.ran(given, cut), given, cut) < 2e-5


def test_keys_and_values_of_two_widths() -> None:
    """Those of MiMo-V2: two groups of 96 channels in a row of K, and one of 128 in a row of V."""
    widths = 192, 128
    specs = QuantSpec(192, 96, 0.96, "float32"), QuantSpec(128, 128, 0.92, "float32")
    sets = tuple(
        general_set(role, 1, HEADS, width, seed=4) for role, width in zip("kv", widths, strict=True)
    )
    g = torch.Generator().manual_seed(7)
    rows = []
    for one, spec in zip(sets, specs, strict=True):
        x = torch.randn(60, HEADS, spec.head_dim, generator=g) + 0.5
        rows.append(x[~near_a_tie(x, matrices(one, 0, HEADS), spec)])
    cut = Cut([9, 7], 8)
    given = torch.randn(cut.total, HEADS * GROUP, 192, generator=g), *(x[: cut.total] for x in rows)
    machine = Machine(sets, specs=specs, softmax=Softmax(192**-0.5))
    out = machine.ran(given, cut)
    assert out.shape == (cut.total, HEADS * GROUP, 128)
    assert away(machine, out, given, cut) < 2e-5


SINKS = torch.linspace(-2.0, 3.0, HEADS * GROUP)


@pytest.mark.parametrize(
    ("sets", "softmax"),
    [
        (ORTHOGONAL, Softmax(SCALE, sinks=SINKS)),
        (GENERAL, Softmax(SCALE, sinks=SINKS)),  # centred keys
        (ORTHOGONAL, Softmax(SCALE, cap=1.5)),
        (ORTHOGONAL, Softmax(SCALE, cap=1.5, sinks=SINKS)),
    ],
    ids=["sinks", "sinks, centred keys", "cap", "cap and sinks"],
)
def test_sinks_and_caps_count_in_all_tiers(sets: tuple[RotationSet, ...], softmax: Softmax) -> None:
    cut = Cut([5, 7, 3], 8)
    machine, given = Machine(sets, softmax=softmax), tokens(cut.total)
    got = machine.ran(given, cut)
    assert away(machine, got, given, cut) < 2e-5
    assert away(Machine(sets), got, given, cut) > 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sets", [ORTHOGONAL, GENERAL], ids=["orthogonal", "general"])
def test_a_gpu_computes_the_same(sets: tuple[RotationSet, ...]) -> None:
    cut = Cut([9, 9], 8)
    machine, given = Machine(sets, device="cuda"), tokens(cut.total)
    out = machine.ran(tuple(x.cuda() for x in given), cut)
    assert away(machine, out, given, cut) < 2e-5


@pytest.mark.parametrize(
    ("machine", "cut"),
    [
        *(
            (Machine(sink=s, recent=r), Cut([6, 5], 6))
            for s, r in ((0, 1), (0, 5), (3, 1), (40, 2))
        ),
        # Windows are rounded to the type of the model, and codes are not.
        (Machine(dtype=torch.bfloat16), Cut([9, 9], 5)),
    ],
    ids=["0 1", "0 5", "3 1", "40 2", "bfloat16"],
)
def test_any_window_sizes_and_type(machine: Machine, cut: Cut) -> None:
    given = tokens(cut.total)
    assert away(machine, machine.ran(given, cut), given, cut) < 2e-5


@pytest.mark.parametrize("prefix", [2, SINK, 11])
def test_a_shared_prefix_is_read_as_int2_and_never_from_a_foreign_ring(prefix: int) -> None:
    machine = Machine()
    q, k, v = tokens(40)
    machine.begin(1)
    machine.run(1, q, k, v, Cut([16], 4))
    other = tokens(20, seed=1)
    machine.begin(2)
    machine.run(2, *other, Cut([20], 0))
    # A row that had another owner; its ring and sinks are full of that owner's tokens.
    machine.begin(2, prefix_of=1, prefix=prefix)
    cut = Cut([5, 4], 6, prefix)
    parts = zip((q, k, v), tokens(15, seed=2), strict=True)
    whole = tuple(torch.cat([mine[:prefix], theirs]) for mine, theirs in parts)
    assert away(machine, machine.run(2, *whole, cut), whole, cut) < 2e-5


def test_two_requests_in_one_batch_do_not_meet() -> None:
    first, second = tokens(20), tokens(20, seed=1)
    want = [Machine().ran(first, Cut([12], 3)), Machine().ran(second, Cut([7], 3))]
    both = Machine()
    got: list[list[Tensor]] = [[], []]
    both.begin(1)
    both.begin(2)
    for size, decode in ((None, False), (1, True), (1, True), (1, True)):
        parts, new = [], []
        for i, (given, prompt) in enumerate(((first, 12), (second, 7))):
            at = len(both.slots_of[i + 1])
            new.append(prompt if size is None else size)
            parts.append([x[at : at + new[-1]] for x in given])
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        out = both.step([1, 2], q, k, v, new, decode=decode)
        for i, piece in enumerate(out.split(new)):
            got[i].append(piece)
    for pieces, whole in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-6, rtol=0)


def test_the_same_token_gets_the_same_codes_from_prefill_and_decode() -> None:
    given = tokens(12)
    by_chunk, by_token = Machine(), Machine()
    by_chunk.ran(given, Cut([12], 0))
    by_token.ran(given, Cut([1], 11))
    one, other = by_chunk.store, by_token.store
    assert one.codes[0][:13].any() and torch.equal(one.codes[0], other.codes[0])
    # A matrix product sums in another order for one row than for twelve.
    torch.testing.assert_close(one.affine[0], other.affine[0], atol=2e-6, rtol=0)


def test_lossless_slots_give_dense_attention() -> None:
    cut = Cut([9, 8], 9)
    q, k, v = tokens(cut.total)
    out = Machine(GENERAL, mode="lossless").ran((q, k, v), cut)
    whole = (q, k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1))
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in whole), is_causal=True, scale=SCALE
    )
    torch.testing.assert_close(out.double(), dense.transpose(0, 1), atol=2e-5, rtol=0)


def test_poisoned_slots_are_not_read_inside_the_window() -> None:
    cut = Cut([9, 8], 9)
    given = tokens(cut.total)
    machine = Machine(recent=64, mode="poison")
    out = machine.ran(given, cut)
    assert machine.reads["slot"] == 0 < machine.reads["ring"]
    assert torch.equal(out, Machine(recent=64).ran(given, cut))


@pytest.mark.parametrize("mutant", ["ring_before_attention", "partner_is_forward"])
def test_the_oracle_notices_a_deliberate_bug(mutant: str) -> None:
    cut = Cut([9, 8], 4)
    machine, given = Machine(GENERAL, mutant=mutant), tokens(cut.total)
    assert away(machine, machine.ran(given, cut), given, cut) > 1e-3


def test_a_row_that_was_not_reset_reads_its_former_owner() -> None:
    machine = Machine()
    machine.ran(tokens(20), Cut([20], 0))
    cut, given = Cut([5], 6, 3), tokens(14, seed=2)
    machine.slots_of[2] = machine.slots_of[1][:3]
    machine.slots_of[1] = machine.slots_of[2]
    assert away(machine, machine.run(1, *given, cut), given, cut) > 1e-3


def test_reads_are_counted_per_tier() -> None:
    machine = Machine()
    machine.ran(tokens(21), Cut([20], 1))
    tiers = {"sink": SINK, "ring": RECENT, "slot": 21 - SINK - RECENT, "slot_sink": 0}
    assert machine.reads == {"extend": 1, "decode": 1, **tiers}
