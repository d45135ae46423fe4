"""What moves codes of 2 bits on a model: rounding, tuning, clips, groups and widths.

    python contrib/benchmarks/two_bits.py MODEL TEXT... [--calib-data mix] [--device cuda]

Every row is a cache. KL is its divergence from the exact cache, in nats per position, on four
windows of 1,536 tokens of each text, at positions behind both windows; digits are those of 256
facts that are recalled. No text should be that of the calibration.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Widths
from oscar_zoo.compute.capture.rows import collect_rows
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.compute import plan_job
from oscar_zoo.compute.methods import feedback
from oscar_zoo.compute.methods.base import FittedPair, fit
from oscar_zoo.compute.methods.table import METHODS, TABLE
from oscar_zoo.compute.options import load, read_data
from oscar_zoo.compute.params import ComputeParams
from oscar_zoo.evaluate.caches import encoder
from oscar_zoo.evaluate.measure import TaskPrompt, exact_predictions, measure, measure_divergence
from oscar_zoo.evaluate.questions import Recall
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.observer import SILENT
from oscar_zoo.registry.targets import parse_model

WINDOWS, LENGTH = 4, 1536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--calib-data", default="mix")
    parser.add_argument("--device")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        params = ComputeParams(
            options.model,
            calib_data=options.calib_data,
            device=options.device,
            output=Path(work) / "out",
        )
        job, _ = plan_job(params, parse_model(options.model, SILENT))
        model = load(job)
        data = read_data(job, model.block, model.tokenizer)
        needs = frozenset(need for method in METHODS.values() for need in method.needs)
        moments = capture(model, data, needs=needs, work=Path(work) / "capture")
        rows = collect_rows(model, data.sequences, job.recipe.group_size)
    exact = {
        path.stem: exact_predictions(model, prompts(model, path.read_text("utf-8")))
        for path in options.texts
    }
    ids = torch.tensor(encoder(model.tokenizer)(options.texts[0].read_text("utf-8")))
    windows = job.recipe.windows
    questions = Recall.from_tokens(
        ids, encoder(model.tokenizer), windows=windows, answers=256, length=LENGTH, unit="token"
    )
    print(f"BF16: {measure(model, questions).value:.1%} of digits", flush=True)
    fits = {name: fit(moments, TABLE[name], rows) for name in ("wush", "wush-tuned")}
    for name, cache in caches(fits, job.recipe, len(model.block.attention_layers)):
        found = [
            f"{text} {measure_divergence(model, one, cache).value:.4f}"
            for text, one in exact.items()
        ]
        recall = measure(model, questions, cache).value
        print(f"{name}: KL {', '.join(found)}; {recall:.1%} of digits", flush=True)


def prompts(model: LoadedModel, text: str) -> list[TaskPrompt]:
    """Windows spread over a text, each with what the tokenizer puts in front."""
    start = model.tokenizer("", add_special_tokens=True)["input_ids"]
    ids, body = encoder(model.tokenizer)(text), LENGTH - len(start)
    stride = max(body, (len(ids) - body) // WINDOWS)
    cut = (start + ids[at * stride : at * stride + body] for at in range(WINDOWS))
    return [
        TaskPrompt(torch.tensor(one), torch.arange(320, LENGTH - 1))
        for one in cut
        if len(one) == LENGTH
    ]


def caches(
    fits: dict[str, FittedPair], recipe: ServingRecipe, layers: int
) -> Iterator[tuple[str, CacheSpec]]:
    """All rows, by name."""
    clip = Clip(k=0.94, v=0.94)
    usual = recipe.model_copy(update={"clip": clip})
    for name, pair in fits.items():
        yield f"{name}, rounded to nearest", CacheSpec(_to_nearest(pair.k), pair.v, usual)
        yield name, CacheSpec(pair.k, pair.v, usual)
    pair = fits["wush-tuned"]
    for ratio in (0.98, 0.96, 0.92):
        other = recipe.model_copy(update={"clip": Clip(k=ratio, v=0.94)})
        yield f"wush-tuned, clip of keys {ratio}", CacheSpec(pair.k, pair.v, other)
    if recipe.group_size == 64:
        groups = usual.model_copy(update={"group_size": 32})
        yield "wush-tuned, groups of 32", CacheSpec(pair.k, pair.v, groups)
    for k, v in ((4, 2), (2, 4), (4, 4)):
        widths = Widths.uniform(layers, k=k, v=v, clip=clip)
        yield f"wush-tuned, K{k} V{v}", CacheSpec(pair.k, pair.v, recipe.with_widths(widths))
    for damping in (0.01, 0.2):
        feedback.DAMPING = damping
        damped = feedback.with_feedback(pair)
        yield f"wush-tuned, damping {damping}", CacheSpec(damped.k, pair.v, usual)


def _to_nearest(keys: RotationSet) -> RotationSet:
    return replace(keys, layers=tuple(replace(one, feedback=None) for one in keys.layers))


if __name__ == "__main__":
    main()
