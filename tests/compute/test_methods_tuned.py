"""`wush-tuned`: less of the real error than WUSH on rows it has not seen, and never more."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from random_moments import MODEL, NUMERICS, describe, layer_rows, random_moments
from torch import Tensor

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.capture.rows import collect_rows
from oscar_zoo.compute.estimate import MORE_RECALL, expected_phases
from oscar_zoo.compute.job import compute_artifact, refit
from oscar_zoo.compute.methods import tuned
from oscar_zoo.compute.methods.base import FitResult, fit
from oscar_zoo.compute.methods.table import METHODS, TUNED
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.options import Job
from oscar_zoo.compute.select import choose
from oscar_zoo.errors import UsageError
from oscar_zoo.models.loading import load_model

GROUP, TOKENS, CPU = 8, 3000, torch.device("cpu")
TUNED_WUSH = TUNED["wush-tuned"]
SIDES: tuple[Role, ...] = ("k", "v")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class RandomRows:
    """Rows of `layer_rows`: two groups per row of K and one of V."""

    tokens: int = TOKENS
    seed: int = 0
    group_size: int = GROUP
    device: torch.device = CPU
    last: int = 0

    def of(self, role: Role, layer_id: int) -> Tensor:
        found = layer_rows(layer_id, tokens=self.tokens, seed=self.seed)
        return torch.from_numpy(found.key if role == "k" else found.value).float()[:, -self.last :]


@pytest.fixture(scope="module")
def moments() -> Moments:
    return random_moments(tokens=TOKENS, weighted=False)


@pytest.fixture(scope="module")
def result(moments: Moments) -> FitResult:
    return fit(moments, TUNED_WUSH, RandomRows())


def lost(result: FitResult, role: Role, rows: RandomRows) -> Tensor:
    """Real error of every layer and head."""
    hessians = torch.from_numpy(result.targets["qq" if role == "k" else "wo"])
    side = result.k if role == "k" else result.v
    matrices = [
        [torch.from_numpy(x).double() for x in (one.forward, one.partner)] for one in side.layers
    ]
    found = [
        tuned.loss(rows.of(role, one.layer_id), *pair, hessian, GROUP, fed_back=role == "k")
        for one, pair, hessian in zip(side.layers, matrices, hessians, strict=True)
    ]
    return torch.stack(found)


def test_the_gradient_is_that_of_the_loss_with_residues_held() -> None:
    draw = torch.Generator().manual_seed(3)
    rows, root, n = (torch.randn(2, k, 8, generator=draw, dtype=torch.float64) for k in (40, 8, 8))
    n = (torch.eye(8) + 0.1 * n).requires_grad_()
    hessian = root @ root.mT
    x = (rows @ n).unflatten(-1, (-1, 4))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / 3
    codes = ((x - low) / scale).detach()
    error = (((codes + 0.5).floor() - codes) * scale).flatten(-2)
    inverse = torch.linalg.inv(n)
    ((error @ inverse @ hessian @ inverse.mT) * error).sum(-1).mean(-1).sum().backward()  # type: ignore[no-untyped-call]
    assert n.grad is not None
    got = tuned.gradient(rows, hessian, n.detach(), 4)
    assert torch.allclose(got, n.grad, rtol=1e-9, atol=1e-9 * float(n.grad.abs().max()))


def test_every_head_loses_less_on_rows_it_has_not_seen(moments: Moments, result: FitResult) -> None:
    wush = fit(moments, METHODS["wush"])
    unseen = RandomRows(seed=1)
    for role in SIDES:
        ratio = lost(result, role, unseen) / lost(wush, role, unseen)
        assert float(ratio.max()) <= 1.001
        assert float(ratio.mean()) < 0.95


def test_a_head_harmed_keeps_wush(moments: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are far too long: what comes out is random, and hardly ever better on the rows
    kept to check."""
    monkeypatch.setattr(tuned, "RATE", 30.0)
    monkeypatch.setattr(tuned, "STEPS", 3)
    found, wush = fit(moments, TUNED_WUSH, RandomRows()), fit(moments, METHODS["wush"])
    kept = 0
    for role in SIDES:
        mine, theirs = (one.k if role == "k" else one.v for one in (found, wush))
        check = RandomRows(last=TOKENS // tuned.CHECKED)
        errors = [lost(one, role, check) for one in (found, wush)]
        for layer, (own, other) in enumerate(zip(mine.layers, theirs.layers, strict=True)):
            for head in range(MODEL.num_kv_heads):
                same = np.array_equal(own.forward[head], other.forward[head])
                assert same or errors[0][layer, head] < errors[1][layer, head]
                assert np.array_equal(own.partner[head], other.partner[head]) == same
                kept += same
    assert kept >= 6


def test_moments_alone_are_not_enough(moments: Moments, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rows of the model"):
        fit(moments, TUNED_WUSH)
    path, info = tmp_path / "moments.safetensors", describe(moments)
    recipe = ServingRecipe(group_size=GROUP, clip=Clip(k=0, v=0))
    with pytest.raises(UsageError) as caught:
        refit(path, moments, info, "wush-tuned", recipe, model_name="random", target=tmp_path)
    assert "compute MODEL" in (caught.value.hint or "")


def test_the_artifact_is_verified_and_says_its_tuning(moments: Moments, result: FitResult) -> None:
    facts = Facts(
        artifact_id=ArtifactId("random", "seq3000_prompt1_group8-wush-tuned"),
        model=MODEL,
        recipe=ServingRecipe(group_size=GROUP, clip=Clip(k=0.96, v=0.92)),
        calibration=describe(moments).calibration,
        numerics=NUMERICS,
        created="2026-01-02T03:04:05Z",
    )
    files = assemble(result, facts)
    outcome = verify_files(files, strict=True)
    assert isinstance(outcome, Verified) and outcome.k is not None
    assert np.array_equal(outcome.k.layers[0].forward, result.k.layers[0].forward)
    said = Manifest.from_bytes(files[FILE_NAME]).fit
    assert said.method == "wush-tuned" and said.composition is None and said.estimator is not None
    assert (said.estimator.k.id, said.estimator.v.id) == ("wush-tuned-k/1", "wush-tuned-v/1")
    assert said.estimator.k.params["steps"] == tuned.STEPS


@pytest.mark.slow
def test_auto_has_it_among_its_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the outlier model no other method but WUSH's comes near it."""
    monkeypatch.setattr(choose, "RECALL_ANSWERS", 8)
    monkeypatch.setattr(tuned, "STEPS", 60)
    news: list[tuple[int, int, str]] = []
    wanted = Job(
        model=str(EXAMPLES / "models/tiny-qwen3-hard"),
        model_name="tiny-qwen3-hard",
        calib_data=EXAMPLES / "text/calibration.txt",
        calib_tokens=1100,
        dtype="float32",  # many processors multiply bfloat16 at a fifth of the speed
        recipe=ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92)),
        seq_len=550,
        output=tmp_path / "out",
        bits=2,
        heldout_tokens=4096,
        clip=(0.96, 0.92),
        allow_poor=True,
    )
    found = compute_artifact(wanted, progress=lambda *one: news.append(one))
    assert found.choice is not None
    rows = {row.method: row for row in found.choice.rows}
    assert rows["wush-tuned"].output_error_geo < rows["wush"].output_error_geo
    assert found.choice.chosen.method in ("wush", "wush-tuned")
    steps = [(done, total) for done, total, what in news if what == "tune" and total]
    assert steps[-1] == (2 * 4 * 60, 2 * 4 * 60)
    phases = list(dict.fromkeys(what for _, _, what in news))
    expected = [phase.name for phase in expected_phases(wanted)]
    assert [name for name in expected if name in phases] == phases
    assert set(expected) - set(phases) <= {MORE_RECALL}
    for name in phases:
        told = [(done, total) for done, total, what in news if what == name and total]
        assert len({total for _, total in told}) <= 1
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert all(done <= total for done, total in told)


def test_rows_of_a_model_are_those_of_its_cache() -> None:
    loaded = load_model(str(EXAMPLES / "models/tiny-qwen3-hard"))
    rows = collect_rows(loaded, [list(range(40)), list(range(50, 80))], 64)
    assert {*rows.kept} == {(role, layer) for role in SIDES for layer in range(4)}
    assert rows.of("k", 3).shape == (2, 70, 64)
    assert rows.of("v", 0).dtype == torch.bfloat16
