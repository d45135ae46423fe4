"""Tensors of a computation meet only tensors on the device of the model, wherever that is: no GPU
is needed to see it.

Here models, rows and sums are on the CPU and everything made without a device is on `meta`. There
the first operation on both fails as it does on a GPU with a tensor left on the CPU, and nothing can
be read back.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny_models import EXAMPLE, write_model
from torch import Tensor

from oscar_zoo.artifact.formats import Role, hadamard_set
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.capture import passes
from oscar_zoo.compute.capture.rows import CalibrationRows, collect_rows
from oscar_zoo.compute.capture.transformers import capture, numerics
from oscar_zoo.compute.data.calibration import CalibrationData, load_calibration
from oscar_zoo.compute.methods import base, tuned
from oscar_zoo.compute.methods.base import fit
from oscar_zoo.compute.methods.table import METHODS, TUNED, fit_all, with_tuned
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord, merge_files
from oscar_zoo.compute.report.build import report_of, report_of_moments, save_report
from oscar_zoo.compute.select.choose import choose
from oscar_zoo.evaluate import caches
from oscar_zoo.evaluate.generate import greedy_generate, prefill_log_probabilities
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(group_size=16, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=4, recent=16))
NEEDS = frozenset(need for method in METHODS.values() for need in method.needs)
CPU = torch.device("cpu")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default device on which nothing else is, in this thread and in those of fits."""
    start = partial(torch.set_default_device, "meta")
    monkeypatch.setattr(base, "ThreadPoolExecutor", partial(ThreadPoolExecutor, initializer=start))
    start()
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Two layers, grouped queries, tied weights, and a context in which questions have room."""
    folder = write_model(tmp_path_factory.mktemp("models") / "random")
    config = json.loads((folder / "config.json").read_bytes()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(str(folder))


@pytest.fixture(scope="module")
def data(loaded: LoadedModel) -> CalibrationData:
    return load_calibration(TEXT, loaded.tokenizer, tokens=1024, seq_len=128, heldout_tokens=1024)


@pytest.fixture(scope="module")
def moments(loaded: LoadedModel, data: CalibrationData) -> Moments:
    return capture(loaded, data, needs=NEEDS)


class Rows(CalibrationRows):
    """Rows as a GPU would give them: on another device than the default one."""

    def of(self, role: Role, layer_id: int) -> Tensor:
        return self.kept[role, layer_id]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_fits(name: str, moments: Moments, elsewhere: None) -> None:
    assert len(fit(moments, METHODS[name]).k.layers) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tuned_method_fits(
    loaded: LoadedModel,
    data: CalibrationData,
    moments: Moments,
    dtype: torch.dtype,
    elsewhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuned, "STEPS", 4)
    kept = collect_rows(loaded, data.sequences, 16).kept
    rows = Rows(CPU, 16, {at: some.to(dtype) for at, some in kept.items()})
    fits = with_tuned(fit_all(moments, ["wush"]), moments, rows, tick=lambda *at: None)
    assert not fits.refused and list(fits.results) == ["wush", *TUNED]


@pytest.mark.parametrize(
    "family", ["Llama", "Qwen3", "Qwen3Moe", "Qwen3Next", "Gemma3Text", "Bamba"]
)
@pytest.mark.parametrize("by_layer", [True, False])
def test_a_model_is_captured(
    family: str, by_layer: bool, elsewhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with CPU:
        model, text = tiny_models.build(family, torch.float32), tiny_models.sequences(40, 33)
    if not by_layer:
        monkeypatch.setattr(passes, "MEMORY_SHARE", 0.0)
    captured = capture(model, text, needs=NEEDS, work=tmp_path / "work")
    captured.check(NEEDS)
    assert all(layer.qq.device == CPU for layer in captured.layers.values())


def test_auto_measures_and_keeps_one(
    loaded: LoadedModel,
    data: CalibrationData,
    moments: Moments,
    elsewhere: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Clips, quality, perplexity, recall, the choice, the files and the report."""
    assert data.heldout is not None
    monkeypatch.setattr(tuned, "STEPS", 4)
    monkeypatch.setattr("oscar_zoo.compute.select.choose.RECALL_ANSWERS", 8)
    monkeypatch.setattr("oscar_zoo.compute.select.choose.RECALL_WINDOWS", (40,))
    monkeypatch.setattr("oscar_zoo.compute.select.choose.RECALL_LEAST", 0.0)
    rows = collect_rows(loaded, data.sequences, 16)
    fits = with_tuned(fit_all(moments), moments, rows, tick=lambda *at: None)
    choice = choose(loaded, data.heldout, fits, RECIPE)
    assert choice.base is not None and choice.base.answers is not None
    facts = Facts(
        artifact_id=ArtifactId("random", "seq1024_prompt8_group16-wush"),
        model=loaded.block,
        recipe=choice.recipe,
        calibration=data.facts(),
        numerics=numerics(loaded),
        created="2026-01-02T03:04:05Z",
        selection=choice.selection,
        quality=choice.quality,
    )
    files = assemble(choice.result, facts)
    assert isinstance(verify_files(files, strict=True), Verified)
    told = report_of(Manifest.from_bytes(files[FILE_NAME]), moments, choice, (), {"fit": 1.0})
    page, notes = save_report(tmp_path / "out", told)
    assert page is not None and not notes


def test_moments_are_saved_merged_drawn_and_fitted_again(
    loaded: LoadedModel, data: CalibrationData, elsewhere: None, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    for path, part in ((one, data.sequences[:3]), (other, data.sequences[3:])):
        some = replace(data, sequences=part)
        sums = capture(loaded, some, needs=NEEDS - {"weighted"})
        info = MomentsInfo(
            model=loaded.block,
            calibration=some.facts(),
            coverage=sums.observed(),
            numerics=numerics(loaded),
            sequences=tuple(map(SequenceRecord.of, part)),
        )
        moments_file.save_moments(path, sums, info)
    merge_files([one, other], tmp_path / "both.safetensors")
    both, info = moments_file.load_moments(tmp_path / "both.safetensors")
    assert report_of_moments(both, info).spectra
    assert fit(both, METHODS["wush"]).k.layers


def test_an_evaluation_and_a_server_are_simulated(loaded: LoadedModel, elsewhere: None) -> None:
    cache = CacheSpec(hadamard_set(loaded.block, "k"), hadamard_set(loaded.block, "v"), RECIPE)
    report = caches.evaluate(
        loaded,
        TEXT.read_text("utf-8")[:9000],
        artifact=None,
        recipe=RECIPE,
        windows=1,
        length=800,
        answers=1,
    )
    assert all(row.perplexity is not None for row in report.rows)
    ids = list(range(3, 60))
    options = {"chunk_size": 25}
    for spec in (cache, None):
        assert len(greedy_generate(loaded, ids, cache=spec, max_new_tokens=3, **options)) == 3
        told = prefill_log_probabilities(loaded, ids, cache=spec, hit=25, **options)
        assert len(told) == len(ids) - 26
