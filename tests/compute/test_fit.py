"""`compute.fit`: the file of moments is enough, wherever its model is."""

from pathlib import Path

import pytest
from random_moments import describe, random_moments

from oscar_zoo.compute.fit import merge_moments, run
from oscar_zoo.compute.moments_file import save_moments
from oscar_zoo.compute.params import FitParams
from oscar_zoo.errors import UsageError


@pytest.fixture
def moments(tmp_path: Path) -> Path:
    """Of a model whose identity is the name of a folder of another machine."""
    sums = random_moments()
    info = describe(sums)
    model = info.model.model_copy(update={"id": "a-model.elsewhere"})
    save_moments(tmp_path / "m.safetensors", sums, info.model_copy(update={"model": model}))
    return tmp_path / "m.safetensors"


def test_a_local_model_is_fitted_where_its_folder_is_not(
    moments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(FitParams(moments, "wush", clip=(0.5, 0.6)))
    assert result.path.parts[0] == "a-model.elsewhere" and result.path.is_dir()
    assert result.manifest.id == "/".join(result.path.parts)
    assert (result.manifest.recipe.clip.k, result.manifest.recipe.clip.v) == (0.5, 0.6)


def test_all_codes_get_4_bits(moments: Path, tmp_path: Path) -> None:
    made = [FitParams(moments, "hadamard", bits=n, output=tmp_path / f"{n}") for n in (4, 2)]
    four, two = map(run, made)
    widths = four.manifest.recipe.widths
    assert widths is not None and two.manifest.recipe.widths is None
    assert {*widths.k.bits, *widths.v.bits} == {4} and {*widths.k.clip, *widths.v.clip} == {0.0}


def test_one_file_is_not_merged(moments: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to merge"):
        merge_moments((moments,), tmp_path / "out.safetensors")
