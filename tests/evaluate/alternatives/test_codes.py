"""What the codes of alternatives promise: exact values, published distortion, and the bytes that a
cache would hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_artifacts import cache_shape
from torch import Tensor

from oscar_zoo.artifact.formats import LayerTransform, hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate import formats
from oscar_zoo.evaluate.against_table import TABLE, choices, pareto_optimal
from oscar_zoo.evaluate.caches import build_caches

D, LENGTH = 128, 1000
MODEL = cache_shape(1, heads=2, kv_heads=1, dim=D)
RECIPE = ServingRecipe(group_size=D, clip=Clip(k=0.9, v=0.9), windows=Windows(sink=64, recent=256))
SETS = hadamard_set(MODEL, "k"), hadamard_set(MODEL, "v")
SUBJECT = formats.Subject(MODEL, RECIPE, SETS, lambda: {0: (4480.0, 4.48)})


def unit_rows(number: int, width: int) -> Tensor:
    """Evenly distributed on the sphere."""
    rows = torch.randn(number, width, generator=torch.Generator().manual_seed(1))
    return rows / rows.norm(dim=-1, keepdim=True)


def through(code: formats.RowCode, rows: Tensor) -> Tensor:
    return code.encode(rows)[0]


def test_fp8_keeps_what_it_can_represent_and_saturates() -> None:
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = finite[finite.isfinite()]
    assert torch.equal(through(formats.float8(), finite), finite)
    assert through(formats.float8(), torch.tensor([1e4, -449.0, 1.06])).tolist() == [448, -448, 1.0]
    (scaled,) = choices(["fp8-scaled"])
    k, v = scaled.build(SUBJECT).sides(MODEL, 0, torch.device("cpu"))
    assert k.stored(torch.tensor([[4480.0, 1e4, 10.6]])).tolist() == [[4480, 4480, 10]]
    assert v.stored(torch.tensor([[4.48, -9.0]]))[0].tolist() == pytest.approx([4.48, -4.48])


@pytest.mark.parametrize("bits", [2, 4])
def test_constant_channels_are_exact_per_channel_and_constant_groups_per_token(bits: int) -> None:
    values = torch.randn(D, generator=torch.Generator().manual_seed(0)).half().float()
    rows = values.expand(64, D)
    assert torch.equal(through(formats.channel_groups(bits, 32), rows), rows)
    assert not torch.allclose(through(formats.token_groups(bits, 32), rows), rows, atol=1e-2)
    same = values[::32].repeat_interleave(32).expand(64, D)
    assert torch.equal(through(formats.token_groups(bits, 32), same), same)


@pytest.mark.parametrize(("bits", "published"), [(1, 0.365), (2, 0.1175), (3, 0.035), (4, 0.0095)])
@pytest.mark.parametrize("width", [64, 128])
def test_turboquant_s_distortion_is_as_published(bits: int, published: float, width: int) -> None:
    """0.36, 0.117, 0.03 and 0.009, rounded, for large widths (theorem 1 of the paper)."""
    rows = unit_rows(4000, width)
    error = (through(formats.mse(bits), rows) - rows).square().sum(-1).mean()
    assert 0.85 * published < error < published


def test_the_codebook_has_each_value_at_the_mean_of_its_bin() -> None:
    """Against samples of the density: Lloyd's and Max's two conditions."""
    values = formats.codebook(64, 3)
    assert np.allclose(values, -values[::-1]) and (np.diff(values) > 0).all()
    sample = unit_rows(8_000, 64).flatten().numpy()
    bins = np.abs(sample[:, None] - values).argmin(1)
    means = np.array([sample[bins == number].mean() for number in range(8)])
    assert np.abs(means - values).max() * 8 < 0.01, "of a standard deviation"


def test_the_rotation_is_orthogonal_and_a_seed_gives_the_same_one() -> None:
    turn = formats.rotation(D, 0).double()
    assert (turn @ turn.T - torch.eye(D)).abs().max() < 1e-6
    formats.rotation.cache_clear()
    assert torch.equal(formats.rotation(D, 0).double(), turn)
    assert not torch.equal(formats.rotation(D, 7).double(), turn)


def test_products_are_right_on_average_with_the_sketch_and_too_small_without() -> None:
    row, query = unit_rows(2, 64)
    seeds = range(0, 400, 2)
    row = row[None]
    plain = [float(through(formats.mse(1, seed), row)[0] @ row[0]) for seed in seeds]
    prod = [float(through(formats.products(2, seed), row)[0] @ row[0]) for seed in seeds]
    assert np.mean(plain) == pytest.approx(2 / np.pi, abs=0.02), "bias of one bit in the paper"
    assert np.mean(prod) == pytest.approx(1, abs=0.03)
    cross = [float(through(formats.products(2, seed), row)[0] @ query) for seed in seeds]
    assert np.mean(cross) == pytest.approx(float(row[0] @ query), abs=0.03)


def test_more_bits_for_outlier_channels_pay() -> None:
    rows = unit_rows(500, D) * torch.where(torch.arange(D) % 4 == 1, 10.0, 1.0)
    apart, plain = (
        float((through(code, rows) - rows).norm())
        for code in (formats.split(0.25, 3, 2), formats.mse(2))
    )
    assert apart < 0.7 * plain


def packed_bytes(arrays: dict[str, object], *, per_sequence: bool) -> int:
    """Bytes of the arrays, with codes packed bit by bit."""
    total = 0
    for one in arrays.values():
        if one.per_sequence != per_sequence:
            continue
        if one.values.dtype == torch.uint8 or one.values.dtype == torch.int64:
            codes = one.values.flatten().numpy().astype(np.uint8)
            assert codes.max(initial=0) < 1 << one.bits
            bits = np.unpackbits(codes[:, None], axis=1)[:, 8 - one.bits :]
            total += np.packbits(bits).nbytes
        elif one.bits == 16:
            assert torch.equal(one.values.half().float(), one.values), "16 bits do not hold it"
            total += one.values.half().numpy().nbytes
        else:
            total += one.values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().nbytes
    return total


@pytest.mark.parametrize(
    "name", [one.name for one in choices(["all"]) if not one.row.made_by.startswith("caches:")]
)
def test_bits_are_those_of_the_bytes_that_are_stored(name: str) -> None:
    (choice,) = [one for one in choices(["all"]) if one.name == name]
    cache = choice.build(SUBJECT)
    assert isinstance(cache, formats.Alternative)
    rows = unit_rows(LENGTH, D)
    occupied, stored = 0, 0.0
    for code, (coded, exact) in zip((cache.k, cache.v), cache.schedule.rows(LENGTH), strict=True):
        _, arrays = code.encode(rows[None, :coded])
        once = packed_bytes(arrays, per_sequence=True)
        occupied += packed_bytes(arrays, per_sequence=False) + once
        occupied += rows[:exact].bfloat16().view(torch.uint8).numel()
        stored += 8 * packed_bytes(arrays, per_sequence=False) / coded
    assert cache.bits_at(MODEL, LENGTH) == pytest.approx(8 * occupied / (LENGTH * 2 * D))
    assert cache.stored_bits(MODEL) == pytest.approx(stored / (2 * D))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8),
        ("omni-scaled:2", 3 + 8 / D),
        ("kivi:2", 3),
        ("kivi:4", 5),
        ("turboquant:2", 2 + 16 / D),
        ("turboquant:2.5", 2.25 + 32 / D),
        ("turboquant-prod:4", 4 + 24 / D),
        ("lmdeploy", 3 + 24 / D),
    ],
)
def test_bits_of_a_stored_element(name: str, bits: float) -> None:
    (choice,) = choices([name])
    assert choice.build(SUBJECT).stored_bits(MODEL) == bits


def test_names_are_sorted_and_given_once() -> None:
    assert [one.name for one in choices(["artifact", "kivi", "fp8", "kivi:2"])] == [
        "fp8", "kivi:2", "kivi:4", "artifact", "artifact:2", "artifact:3", "artifact:4",
    ]  # fmt: skip
    assert {one.row.name for one in choices(["all"])} == set(TABLE)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kivy", "kivi, kivi-windows"),
        ("kivi:3", "known: kivi:2, kivi:4"),
        ("fp8:8", "known: fp8"),
        ("", "fp8"),
    ],
)
def test_names_that_are_not_known(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        choices([name])
    assert hint in (raised.value.hint or "")


def test_a_model_that_a_method_cannot_store_is_refused() -> None:
    odd = MODEL.model_copy(update={"head_dim": 88, "v_head_dim": 88})
    (choice,) = choices(["lmdeploy"])
    with pytest.raises(UsageError, match="no Hadamard matrix for 88 channels"):
        choice.build(formats.Subject(odd, RECIPE.override(group_size=88), None))


def test_all_leaves_out_what_does_not_fit_and_measures_the_artifact_once() -> None:
    odd = MODEL.model_copy(update={"head_dim": 88, "v_head_dim": 88})
    eye = np.eye(88, dtype=np.float32)
    sets = [replace(x, layers=(LayerTransform(0, eye, eye, None),)) for x in SUBJECT.artifact or ()]
    subject = formats.Subject(odd, RECIPE.override(group_size=88), (sets[0], sets[1]))
    built, left_out = build_caches(choices(["all"]), subject, False)
    assert {name.partition(":")[0] for name in left_out} == {
        "hadamard",
        "hadamard-clip",
        "omni-scaled",
        "lmdeploy",
    }
    names = [choice.name for choice, _ in built]
    assert names[0] == "artifact" and not {"artifact:2"} & {*names} and "artifact:4" in names
    assert len(set(names)) == len(names) == len(choices(["all"])) - len(left_out) - 1
    with pytest.raises(UsageError):
        build_caches(choices(["lmdeploy"]), subject, True)


def test_pareto_optimal_points_are_beaten_by_none() -> None:
    nan = float("nan")
    points = [(2.0, 1.0), (3.0, 0.5), (3.0, 0.5), (3.5, 0.6), (4.0, 0.5), (1.0, nan), (16.0, 0.0)]
    assert pareto_optimal(points) == [True, True, True, False, False, False, True]
