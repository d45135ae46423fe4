"""What codes of 2 bits cost a small model with multi-head latent attention (MLA).

    python contrib/mla/simulate.py FOLDER [--text CALIBRATION VALIDATION]

FOLDER holds a model that `tiny_model.py` made. Without it the bytes of a token of DeepSeek-V3 are
printed. The quantizer, the windows, the fits and the tasks are those of the project; `latent_cache`
says what is in the cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from latent_cache import WINDOWS, LatentCache, Part, exact, geometry, run, weights
from tiny_model import CALIBRATION, LENGTH, RANK, ROOT, ROPE, TEACHER, load_teacher
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oscar_kernels.quantizer import fake_quantize
from oscar_kernels.spec import QuantSpec, row_bytes
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.methods import feedback, wush
from oscar_zoo.compute.methods.base import hadamard_matrix
from oscar_zoo.compute.methods.rotations import r_h_pbr
from oscar_zoo.compute.moments import row_losses
from oscar_zoo.compute.products import add_gram, symmetric
from oscar_zoo.evaluate.caches import encoder
from oscar_zoo.evaluate.formats import float8, token_groups
from oscar_zoo.evaluate.measure import TaskPrompt
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.simulated_cache import SimulatedCache
from oscar_zoo.models.attention import AttentionFn, Softmax
from oscar_zoo.models.loading import load_tokenizer

TEXTS = CALIBRATION, ROOT / "examples/text/validation.txt"


class Statistics:
    """Per layer, `[1, d, d]` float64: the Gram matrix of rows, and what an error of a row costs as
    a key, as a value and as both (`row_losses`)."""

    def __init__(self, model: Any, windows: Windows = WINDOWS) -> None:
        self.layers, self.windows, width = model.model.layers, windows, RANK + ROPE
        self.gram, self.keys, self.values, self.cross = (
            {i: torch.zeros(1, width, width, dtype=torch.float64) for i in range(len(self.layers))}
            for _ in range(4)
        )

    def __call__(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        _, up_v, out = weights(self.layers[layer_id])
        rows = key[0, 0].float()
        add_gram(self.gram[layer_id], rows[None])
        found = row_losses(query[0], rows, softmax.scaling, up_v, out, self.windows)
        for sums, part in zip((self.keys, self.values, self.cross), found, strict=True):
            sums[layer_id] += part
        return exact(layer_id, query, key, value, softmax)


Fit = tuple[Tensor, Tensor, Tensor]
"""The transform and its partner, `[d, d]` float64, and the loss that they were fitted to."""


def fits(found: Statistics, layer_id: int, channels: slice) -> Mapping[str, Fit]:
    """Transforms of some channels of the rows of a layer, by name."""
    gram, keys, values, cross = (
        symmetric(part[layer_id])[:, channels, channels]
        for part in (found.gram, found.keys, found.values, found.cross)
    )
    d, whole = gram.shape[-1], keys + values + cross
    rotations = {
        "none": torch.eye(d, dtype=torch.float64),
        "Hadamard": hadamard_matrix(d, gram.device),
        "PCA of rows, Hadamard": r_h_pbr(gram)[0][0],
        "PCA of the loss, Hadamard": r_h_pbr(whole)[0][0],
    }
    result = {name: (one, one, whole) for name, one in rotations.items()}
    for name, loss in (("keys", keys), ("values", values), ("both", whole)):
        if bool((torch.diagonal(loss[0]) > 0).any()):
            forward, partner, _ = wush.transform(gram, loss)
            result[f"WUSH, {name}"] = (forward[0], partner[0], whole)
    return result


def latent(fit: Fit, group: int, bits: int = 2, clip: float = 0.0, carry: bool = False) -> Part:
    """The latent in codes; with `carry`, a channel makes up for the errors of those before."""
    spec = QuantSpec(len(fit[0]), group, clip, bits=bits)
    carried = feedback.matrices(fit[1][None], fit[2]) if carry else None
    return Part(
        fit[0].float(),
        fit[1].float(),
        lambda rows: fake_quantize(rows, spec, carried),
        8 * row_bytes(spec) / spec.head_dim,
    )


def rotary(fit: Fit, bits: int) -> Part:
    """The rotary key in BF16, FP8, or codes of 4 or 2 bits with one group."""
    width = len(fit[0])
    code = float8() if bits == 8 else token_groups(bits, width)
    read = (lambda x: x.bfloat16().float()) if bits == 16 else (lambda x: code.encode(x)[0])
    return Part(fit[0].float(), fit[1].float(), read, bits + (0 if bits >= 8 else 32 / width))


class Tasks:
    """Perplexity and divergence behind the windows, and tokens of facts that are recalled."""

    def __init__(self, model: Any, text: str, number: int, tokenizer: Any) -> None:
        self.model, encode = model, encoder(tokenizer)
        ids = torch.tensor(encode(text))
        skip = WINDOWS.sink + WINDOWS.recent
        self.text = Perplexity.from_tokens(ids, windows=number, length=LENGTH, skip=skip)
        self.recall = Recall.from_tokens(
            ids, encode, windows=WINDOWS, answers=8 * number, length=LENGTH, unit="token"
        )
        self.exact: list[Tensor] = []
        self.exact = [self._logits(exact, prompt).log_softmax(-1) for prompt in self.text.prompts]

    def _logits(self, fn: AttentionFn, prompt: TaskPrompt) -> Tensor:
        return run(self.model, fn, prompt.ids)[prompt.scored]

    @torch.inference_mode()
    def perplexity_of(self, model: Any) -> float:
        """Of another model, with its own attention."""
        logits = (model(one.ids[None]).logits[0, one.scored] for one in self.text.prompts)
        counts = [self.text.count(*pair) for pair in zip(self.text.prompts, logits, strict=True)]
        return self.text.result(sum(loss for loss, _ in counts), sum(n for _, n in counts))

    def measure(self, fn: AttentionFn) -> tuple[float, float, float]:
        """Perplexity, KL in nats per position, and the share of tokens recalled."""
        total, divergence, number = 0.0, 0.0, 0
        for prompt, before in zip(self.text.prompts, self.exact, strict=True):
            logits = self._logits(fn, prompt)
            loss, positions = self.text.count(prompt, logits)
            total, number = total + loss, number + positions
            after = logits.log_softmax(-1)
            divergence += float(functional.kl_div(after, before, log_target=True, reduction="sum"))
        answers = [self.recall.count(one, self._logits(fn, one)) for one in self.recall.prompts]
        right, asked = (sum(column) for column in zip(*answers, strict=True))
        return self.text.result(total, number), divergence / number, right / asked


def caches(found: Statistics) -> Iterator[tuple[str, LatentCache]]:
    """All rows of the table."""
    ids = list(found.gram)
    latents = {i: fits(found, i, slice(0, RANK)) for i in ids}
    rotaries = {i: fits(found, i, slice(RANK, None)) for i in ids}
    bf16 = {i: rotary(rotaries[i]["none"], 16) for i in ids}

    def cache(name: str, group: int, **more: Any) -> LatentCache:
        return LatentCache({i: (latent(latents[i][name], group, **more), bf16[i]) for i in ids})

    best = "WUSH, both"
    for name in latents[0]:
        yield f"{name}, groups of 128", cache(name, 128)
    some = ("none", "Hadamard", "PCA of rows, Hadamard", best)
    for group in (64, 32):
        for name in some:
            yield f"{name}, groups of {group}", cache(name, group)
    yield f"{best}, groups of 128, clip 0.94", cache(best, 128, clip=0.94)
    for name in some:
        yield f"{name}, groups of 128, carried", cache(name, 128, carry=True)
    yield f"{best}, groups of 64, carried", cache(best, 64, carry=True)
    yield f"{best}, groups of 128, carried, clip 0.94", cache(best, 128, clip=0.94, carry=True)
    base, wide = (cache(best, 128, bits=bits, carry=True) for bits in (2, 4))
    for name, one in (("none, groups of 128", cache("none", 128)), ("carried", base)):
        yield f"{name}, without windows", replace(one, windows=Windows(sink=0, recent=1))
    for turn, bits in (("none", 8), ("none", 4), ("none", 2), (best, 4), (best, 2)):
        layers = {i: (base.layers[i][0], rotary(rotaries[i][turn], bits)) for i in ids}
        yield f"carried, rotary key in {bits} bits, {turn}", replace(base, layers=layers)
    for i in ids:
        layers = {**base.layers, i: wide.layers[i]}
        yield f"carried, layer {i} in 4 bits", replace(base, layers=layers)
    yield "carried, all layers in 4 bits", wide


def print_bytes(rank: int = 512, rope: int = 64) -> None:
    """Of a token and layer of DeepSeek-V3 or GLM-5.2, as SGLang 0.5.21 stores it and as 2 bits."""
    one = torch.eye(rope)
    stored = {
        "BF16": 2 * (rank + rope),
        "FP8": rank + rope,
        "FP8 of sparse attention, rotary key in BF16": rank + rank // 128 * 4 + 2 * rope,
        "FP4, a scale for 16 channels": (rank + rope) // 2 + (rank + rope) // 16,
    }
    for bits in (16, 8, 4, 2):
        rotated = round(rotary((one, one, one), bits).bits * rope / 8)
        name = f"2 bits in groups of 128, rotary key in {bits} bits"
        stored[name] = row_bytes(QuantSpec(rank, 128)) + rotated
    for name, size in stored.items():
        print(f"| {name} | {size} | {stored['BF16'] / size:.2f} | {size + 132} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--text", nargs=2, type=Path, default=TEXTS)
    parser.add_argument("--windows", type=int, default=6, help="of each task [default: 6]")
    options = parser.parse_args()
    if options.folder is None:
        print_bytes()
        return
    tokenizer = load_tokenizer(str(TEACHER))
    calibration, validation = (path.read_text("utf-8") for path in options.text)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    found = statistics(model, torch.tensor(encoder(tokenizer)(calibration)))
    tasks = Tasks(model, validation, options.windows, tokenizer)
    print(f"The teacher's perplexity is {tasks.perplexity_of(load_teacher()):.4f}.")
    perplexity, _, recalled = tasks.measure(exact)
    print("| cache | bits of the latent | perplexity | more | KL | recall |")
    print("|---|---|---|---|---|---|")
    print(f"| BF16 | 16 | {perplexity:.4f} | | | {recalled:.1%} |", flush=True)
    for name, cache in caches(found):
        fn = SimulatedCache(cache, geometry(model), torch.device("cpu"))
        mine, divergence, recall = tasks.measure(fn)
        print(
            f"| {name} | {cache.bits:.2f} | {mine:.4f} | {mine / perplexity - 1:+.2%} |"
            f" {divergence:.4f} | {recall:.1%} |",
            flush=True,
        )


def statistics(model: Any, ids: Tensor, number: int = 12) -> Statistics:
    """Of stretches spread over a text."""
    found = Statistics(model)
    for at in range(number):
        start = (len(ids) - LENGTH) * at // number
        run(model, found, ids[start : start + LENGTH])
    return found


if __name__ == "__main__":
    main()
