"""A trained model gives the tokens of the reference on every kind of device and in both types, with
the kernels of a GPU too: `make gpu-check` runs this file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import oscar_zoo
from oscar_zoo.engines.transformers.cache import Attention
from oscar_zoo.evaluate.generate import GenerationRequest
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import Dtype, LoadedModel, load_model
from oscar_zoo.observer import SILENT
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import open_artifact
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.transformers import OscarCache

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MODEL = str(EXAMPLES / "models/tiny-qwen3-hard")
WAYS: tuple[Attention, ...] = ("auto", "keep")
LENGTHS, NEW, LONG = (700, 380, 500), 16, 8192
NEARLY = 0.1
"""By so much in log-probability a token may lead another one that is taken: kernels and bfloat16
round differently."""
FAR = 0.02
"""Largest relative distance of log-probabilities; bfloat16 moves them by 0.005 on a CPU."""
CASES = [
    pytest.param(device, dtype, marks=marks, id=f"on-{device}-{dtype}")
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rotation of some quality: behind a poor one, rounding moves the next token by itself."""
    output = tmp_path_factory.mktemp("made") / "rotation"
    oscar_zoo.compute_artifact(
        MODEL, calib_data=str(EXAMPLES / "text/calibration.txt"), calib_tokens=8192, seq_len=1024,
        method="wush", fast=True, allow_poor=True, device="cpu", output=output,
    )  # fmt: skip
    return output


def reference(model: LoadedModel, spec: CacheSpec, ids: Tensor) -> Tensor:
    """Log-probabilities that the chunked server has for each new token, `[NEW, vocabulary]`."""
    request = GenerationRequest(model, spec)
    found = [request.extend(ids)[-1]]
    while len(found) < NEW:
        found.append(request.decode(int(found[-1].argmax())))
    return torch.stack(found).float().log_softmax(-1).cpu()


def compared(want: Tensor, got: Tensor) -> tuple[float, float]:
    """By how much the reference prefers its own token at the first one that differs, and how far
    apart log-probabilities are up to there."""
    other = [*(want.argmax(-1) != got.argmax(-1)).nonzero().flatten().tolist(), NEW - 1]
    want, got = want[: other[0] + 1], got[: other[0] + 1]
    lead = want[-1].max() - want[-1, got[-1].argmax()]
    return float(lead), float((want - got).norm() / want.norm())


@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_tokens_and_bytes(folder: Path, device: str, dtype: Dtype) -> None:
    model = load_model(MODEL, dtype=dtype, device=device)
    artifact = open_artifact(targets.parse(folder), Sources(None), SILENT)
    recipe = artifact.recipe
    assert recipe is not None
    spec = CacheSpec(*artifact.rotations(), recipe)
    text = (EXAMPLES / "text/validation.txt").read_text("utf-8")
    ids = torch.tensor(model.tokenizer(text)["input_ids"])
    prompts = [ids[9000 * row :][:n] for row, n in enumerate(LENGTHS)]
    want = [reference(model, spec, prompt) for prompt in prompts]

    def found(rows: list[int], way: Attention) -> list[tuple[float, float]]:
        width = max(len(prompts[row]) for row in rows)
        batch, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        for at, row in enumerate(rows):
            batch[at, width - LENGTHS[row] :], mask[at, width - LENGTHS[row] :] = prompts[row], 1
        cache = OscarCache.from_artifact(
            artifact, model=model.model, attention=way,
            attention_mask=mask if way == "keep" else None,
        )  # fmt: skip
        got = model.model.generate(
            batch.to(device), attention_mask=mask.to(device), past_key_values=cache,
            max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        ).logits  # fmt: skip
        logits = torch.stack(got, 1).float().log_softmax(-1).cpu()
        if device == "cuda" and way == "auto":
            assert cache.graph is not None and cache.graph.replays == NEW - 3
        return [compared(want[row], new) for row, new in zip(rows, logits, strict=True)]

    # A value between two codes goes the other way on another processor, which moves them by 3e-4.
    nearly, far = (0, 1e-3) if (device, dtype) == ("cpu", "float32") else (NEARLY, FAR)
    for way in WAYS:
        model.model.set_attn_implementation("sdpa")
        leads, distances = zip(*found([0], way), *found([0, 1, 2], way), strict=True)
        assert max(leads) <= nearly and max(distances) <= far
    cache = OscarCache.from_artifact(artifact, model=model.model)
    with torch.no_grad():
        for piece in ids[None, :LONG].to(device).split(1024, 1):
            model.model(piece, past_key_values=cache, logits_to_keep=1)
    block = model.block
    row = len(block.attention_layers) * block.num_kv_heads * sum(block.head_dims)
    assert 4 * cache.nbytes <= LONG * row * getattr(torch, dtype).itemsize
