"""The write of few latents: its kernel in CUDA C++, run by an emulator where g++ is, and on a
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_write_jobs import DEVICE, Job, assert_same, bfloat16_job, fed_back
from latent_emulation import EmulatedWrite

from oscar_kernels.kv_write import dispatch, latent
from oscar_kernels.spec import PLAIN, QuantSpec

SHAPES = pytest.mark.parametrize(
    ("spec", "rotary"), [((512, 128), 64), ((256, 128), 32), ((128, 128), 16)], ids=str
)
CARRIED = pytest.mark.parametrize("carried", [False, True])


def job_of(spec: tuple[int, int], rotary: int, carried: bool, tokens: int = 9) -> Job:
    """Windows that take some of the tokens."""
    rows = QuantSpec(*spec), QuantSpec(rotary, rotary, bits=PLAIN)
    job = bfloat16_job(*rows, heads=1, group=3, mean=False, tokens=tokens)
    return fed_back(job) if carried else job


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedWrite:
    return EmulatedWrite(tmp_path_factory.mktemp("latent_write"))


@SHAPES
@CARRIED
def test_bytes_equal_the_reference(
    emulated: EmulatedWrite, spec: tuple[int, int], rotary: int, carried: bool
) -> None:
    if DEVICE == "cuda":
        pytest.skip("the emulator needs tensors on the CPU")
    job = job_of(spec, rotary, carried)
    strided = torch.zeros(len(job.value), 1, 2 * rotary, dtype=torch.bfloat16)
    strided[..., :rotary] = job.value
    assert_same(emulated, replace(job, value=strided[..., :rotary]), rows=2**-7)


@pytest.mark.gpu
@SHAPES
@pytest.mark.parametrize(
    ("tokens", "carried"), [(1, True), (16, True), (latent.MOST_TOKENS, False)]
)
def test_bytes_on_a_gpu(spec: tuple[int, int], rotary: int, tokens: int, carried: bool) -> None:
    """With feedback one tie moves all later codes of its row, so few rows have it here."""
    job = job_of(spec, rotary, carried, tokens)
    assert latent.unsupported(job.key, job.value, job.cache, job.targets) is None
    assert_same(dispatch, job, allowed=3, rows=2**-7)


def test_a_prompt_and_a_clip_are_for_triton() -> None:
    job = job_of((128, 128), 16, False)
    given = job.key, job.value, job.cache, job.targets
    assert latent.misfit(*given) is None
    assert latent.misfit(*given, parts="slots") and latent.misfit(*given, rows_out=())
    clipped = replace(job.cache, k_spec=QuantSpec(128, 128, 0.96))
    assert latent.misfit(job.key, job.value, clipped, job.targets)
