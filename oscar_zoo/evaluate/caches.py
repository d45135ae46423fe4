"""Caches on one model over the same text and questions, and what an element costs in each.

BF16 is compared with data-free INT2 caches and that of an artifact (or the artifact under several
settings), and with `--against` the caches of other methods. All rows see the same tokens, windows,
group size and quantizer. Every query position reads its own window exactly, and the rest as INT2,
so no number depends on how a server would chunk the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.artifact.formats import RotationSet, hadamard_set
from oscar_zoo.artifact.specs import Clip, CodeBits, Geometry, ServingRecipe, Widths, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate import measure
from oscar_zoo.evaluate.against_table import BF16, LONG, OWN, TABLE, Choice, by_bits
from oscar_zoo.evaluate.formats import Alternative, RowCode, Schedule, Subject
from oscar_zoo.evaluate.outcome import AgainstReport, AgainstRow, EvalReport, EvalRow, MeasuredModel
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.shared import TEXTS, Progress, fitting, read_text, ticking
from oscar_zoo.evaluate.simulated_cache import BF16_BITS, CacheSpec, SimulatedCache
from oscar_zoo.evaluate.statistics import relative_change, standard_error
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel

CONTEXTS = (8192, 32768, 131072)
"""Tokens of sequences for which a comparison also tells what an element costs."""
CODE_BITS: dict[float, tuple[CodeBits, CodeBits]] = {2: (2, 2), 3: (4, 2), 4: (4, 4)}
"""Bits of keys and of values, by their mean."""


def caches_of(
    geometry: Geometry, artifact: tuple[RotationSet, RotationSet] | None, recipe: ServingRecipe
) -> dict[str, CacheSpec | None]:
    """`bf16`, `int2`, `int2-hadamard`, `int2-hadamard-clip`, and `artifact` where there is one;
    `None` for a cache that rounds nothing."""
    subject = Subject(geometry, recipe, artifact)
    caches: dict[str, CacheSpec | None] = {"bf16": None, "int2": integers(2, subject)}
    caches["int2-hadamard"] = hadamard(2, subject)
    caches["int2-hadamard-clip"] = hadamard_clipped(2, subject)
    if artifact is not None:
        caches["artifact"] = transformed(None, subject)
    for spec in reversed(list(caches.values())):  # the artifact's mismatch is the one to report
        if spec is not None:
            spec.check(geometry)
    return caches


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return encode


def bits_at(spec: CacheSpec | Alternative | None, geometry: Geometry, length: int) -> float:
    """Of all that a sequence occupies, for each element of its rows."""
    return BF16_BITS if spec is None else spec.bits_at(geometry, length)


def bit_facts(
    spec: CacheSpec | Alternative | None, geometry: Geometry, length: int
) -> dict[str, Any]:
    return {
        "bits_per_element": BF16_BITS if spec is None else spec.stored_bits(geometry),
        "bits_per_element_with_windows": bits_at(spec, geometry, length),
        "bits_per_element_at": {str(n): bits_at(spec, geometry, n) for n in CONTEXTS},
    }


def largest_magnitudes(model: LoadedModel, length: int) -> dict[int, tuple[float, float]]:
    """Of keys and of values by layer, on the first `length` tokens of our calibration text."""
    text = read_text(next(iter(TEXTS)), "calibration")[: 16 * length]
    ids = torch.tensor(encoder(model.tokenizer)(text)[:length], device="cpu")
    exact = RowCode(lambda rows: (rows, {}))
    attend = SimulatedCache(Alternative(exact, exact, Schedule()), model.block, model.device)
    found = {}

    def seen(layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        found[layer] = float(key.abs().max()), float(value.abs().max())
        return attend(layer, query, key, value, softmax)

    prompt = measure.TaskPrompt(ids, torch.tensor([len(ids) - 1], device="cpu"))
    with attention_scope(model, seen), torch.inference_mode():
        list(measure.all_logits(model, [prompt]))
    return found


def facts_of(model: LoadedModel, text: str, recipe: ServingRecipe) -> dict[str, Any]:
    block = model.block
    return {
        "model": MeasuredModel(block.id, block.revision, block.config_sha256, model.dtype),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "sink": recipe.windows.sink,
        "recent": recipe.windows.recent,
        "clip": recipe.clip,
        "group_size": recipe.group_size,
        "scale_dtype": recipe.scale_dtype,
        "quantizer": recipe.quantizer,
        "chunking": "every position exact",
        "torch": torch.__version__,
        "device": str(model.device),
    }


def integers(bits: float | None, subject: Subject) -> CacheSpec:
    return CacheSpec(None, None, _recipe(subject, bits or 2, clipped=False))


def hadamard(bits: float | None, subject: Subject, *, clipped: bool = False) -> CacheSpec:
    """Rows behind a Hadamard matrix, without a clip."""
    sets = hadamard_set(subject.geometry, "k"), hadamard_set(subject.geometry, "v")
    return CacheSpec(*sets, _recipe(subject, bits or 2, clipped=clipped))


def hadamard_clipped(bits: float | None, subject: Subject) -> CacheSpec:
    """The same with the clip ratios of the recipe."""
    return hadamard(bits, subject, clipped=True)


def transformed(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows behind the transforms of the artifact; without `bits` as its recipe says."""
    assert subject.artifact is not None
    recipe = subject.recipe if bits is None else _recipe(subject, bits, clipped=True)
    return CacheSpec(*subject.artifact, recipe)


def _recipe(subject: Subject, bits: float, *, clipped: bool) -> ServingRecipe:
    """The recipe of `subject` with the same bits in every layer, and its clip or none."""
    recipe = subject.recipe.with_widths(None)
    if not clipped:
        none = Clip(k=0.0, v=0.0, algorithm="none")
        recipe = recipe.model_copy(update={"clip": none})
    if bits == 2:
        return recipe
    layers = len(subject.geometry.attention_layers)
    k, v = CODE_BITS[bits]
    return recipe.with_widths(Widths.uniform(layers, k=k, v=v, clip=recipe.clip))


TASKS = ("perplexity", "recall")
Artifact = tuple[RotationSet, RotationSet]
Setting = tuple[ServingRecipe, Mapping[str, Any]]
"""A recipe to measure with, and what it has in place of the report's, as plain values."""
SEED = 0
"""Of the recall prompts."""


def evaluate(
    model: LoadedModel,
    text: str,
    *,
    tasks: Sequence[str] = TASKS,
    artifact: Artifact | None,
    recipe: ServingRecipe,
    windows: int = 6,
    length: int = 2048,
    answers: int = 64,
    settings: Sequence[Setting] = (),
    progress: Progress = lambda done, total, unit: None,
) -> EvalReport:
    """Measure BF16, the data-free baselines and an artifact, if there is one, on held-out text.

    The clip of `recipe`, if any, is for `int2-hadamard-clip` and `artifact`. Windows and recall
    prompts have `length` tokens at most; the model's own limit applies. With `settings`, the
    artifact is measured under each in place of the baselines; `recipe` only describes the report.
    """
    caches: list[tuple[str, CacheSpec | None, Mapping[str, Any]]] = [("bf16", None, {})]
    if settings:
        assert artifact is not None
        caches += [("artifact", CacheSpec(*artifact, one), changes) for one, changes in settings]
    else:
        found = caches_of(model.block, artifact, recipe)
        if not (recipe.clip.k or recipe.clip.v):
            del found["int2-hadamard-clip"]  # the same as `int2-hadamard`
        caches = [(name, spec, {}) for name, spec in found.items()]
    for _, spec, _ in caches:
        if spec is not None:
            spec.check(model.block)
    length = fitting(length, model.block)
    used = [one.windows for one, _ in settings] or [recipe.windows]
    widest = {"sink": max(w.sink for w in used), "recent": max(w.recent for w in used)}
    exact = used[0].model_copy(update=widest)
    asked, tokens = _tasks(model, text, tasks, exact, windows, length, answers)
    tick = ticking(progress, len(caches) * sum(len(task.prompts) for task in asked), "sequences")
    rows, compared = [], dict[str, list[measure.Measurement]]()
    for cache, spec, changes in caches:
        compared[cache] = [measure.measure(model, task, spec, tick=tick) for task in asked]
        values = {task.name: one.value for task, one in zip(asked, compared[cache], strict=True)}
        row = EvalRow(
            cache=cache,  # type: ignore[arg-type]
            perplexity=values.get("perplexity"),
            recall=values.get("recall"),
            changes=changes,
            **bit_facts(spec, model.block, length),
        )
        rows.append(row)
    pairs = zip(asked, compared["bf16"], compared.get("artifact", ()), strict=False)
    return EvalReport(
        **facts_of(model, text, recipe),
        tokens=tokens,
        length=length,
        tasks={task.name: task.describe() for task in asked},
        rows=tuple(rows),
        compared=() if settings else tuple(pairs),
    )


def _tasks(
    model: LoadedModel,
    text: str,
    names: Sequence[str],
    exact: Windows,
    windows: int,
    length: int,
    answers: int,
) -> tuple[list[Any], int]:
    encode = encoder(model.tokenizer)
    ids, tasks = torch.tensor(encode(text), device="cpu"), list[measure.Task]()
    for name in dict.fromkeys(names):
        if name == "perplexity":
            tasks.append(Perplexity.from_tokens(ids, windows=windows, length=length))
        elif name == "recall":
            size = {"answers": answers, "length": length, "seed": SEED}
            tasks.append(Recall.from_tokens(ids, encode, windows=exact, unit="token", **size))
        else:
            raise UsageError(f"no task is called {name!r}.", hint=f"tasks: {', '.join(TASKS)}")
    return tasks, len(ids)


def compare(
    model: LoadedModel,
    text: str,
    chosen: Sequence[Choice],
    *,
    artifact: Artifact,
    method: str,
    recipe: ServingRecipe,
    windows: int = 6,
    length: int = 2048,
    answers: int = 64,
    strict: bool = True,
    progress: Progress = lambda done, total, unit: None,
) -> AgainstReport:
    """Measure BF16, the artifact, which was made by `method`, and the alternatives that were
    `chosen`: bits, divergence, perplexity and recall of each. The windows of `recipe` are those of
    all alternatives that take them; one that does not fit the model is left out unless `strict`.
    Windows and recall prompts have `length` tokens at most; the model's own limit applies."""
    length, context = fitting(length, model.block), fitting(int(LONG), model.block)
    subject = Subject(model.block, recipe, artifact, lambda: largest_magnitudes(model, length))
    caches, left_out = build_caches(chosen, subject, strict)
    behind = recipe.windows.sink + recipe.windows.recent
    (cut, digits), tokens = _tasks(model, text, TASKS, recipe.windows, windows, length, answers)
    prompts = len(cut.prompts) + len(digits.prompts)
    tick = ticking(progress, len(cut.prompts) + (1 + len(caches)) * prompts, "sequences")
    scored = tuple(replace(one, scored=one.scored[behind:]) for one in cut.prompts)
    exact = measure.exact_predictions(model, scored, tick=tick)
    recall = digits, replace(digits, unit="answer")
    elements = len(model.block.attention_layers) * model.block.num_kv_heads
    elements *= sum(model.block.row_dims)
    rows: list[AgainstRow] = []
    base: measure.Measurement | None = None
    for choice, cache in [(BF16, None), *caches]:
        perplexity, divergence = measure.measure_both(model, cut, exact, cache, tick=tick)
        shares = measure.measure_each(model, recall, cache, tick=tick)
        base = base or perplexity
        change, error = relative_change(cut.result, perplexity, base)
        own, title = choice.row.name == OWN, choice.title
        if own and isinstance(cache, CacheSpec):
            title = f"{method}:{cache.code_bits(model.block):.3g}"
        row = AgainstRow(
            cache=choice.name,
            title=title,
            own=own,
            windows=choice.row.windows,
            source=choice.row.source,
            divergence=divergence.value if cache else 0.0,  # BF16 has none by definition
            divergence_error=standard_error(truediv, divergence) if cache else None,
            perplexity=perplexity.value,
            perplexity_change=100 * change,
            perplexity_change_error=None if error is None else 100 * error,
            digits=shares[0].value,
            digits_error=standard_error(truediv, shares[0]),
            answers=shares[1].value,
            answers_error=standard_error(truediv, shares[1]),
            tokens_per_gb=int(8e9 / bits_at(cache, model.block, context) / elements),
            **bit_facts(cache, model.block, length),
        )
        rows.append(row)
    return AgainstReport(
        **facts_of(model, text, recipe),
        tokens=tokens,
        length=length,
        tasks={
            "perplexity": cut.describe(),
            "recall": {k: v for k, v in digits.describe().items() if k != "unit"},
            "divergence": {"windows": len(exact.prompts), "positions": exact.positions},
        },
        context=context,
        rows=by_bits(rows),
        left_out=left_out,
    )


def build_caches(
    chosen: Sequence[Choice], subject: Subject, strict: bool
) -> tuple[list[tuple[Choice, Alternative | CacheSpec]], dict[str, str]]:
    """The caches to measure, the artifact first, and the reasons why others are left out."""
    own = Choice(TABLE[OWN])
    built, left_out = [(own, own.build(subject))], {}
    uniform = None if subject.recipe.widths else 2.0
    for one in chosen:
        if one.row.name == OWN and one.bits in (None, uniform):
            continue  # measured already
        try:
            built.append((one, one.build(subject)))
        except UsageError as error:
            if strict:
                raise
            left_out[one.name] = error.message
    return built, left_out
