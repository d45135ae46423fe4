"""Ask a model, or running servers, for facts in long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from oscar_zoo.artifact.specs import read_clip
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.params import CACHES, Family, RulerParams, numbers
from oscar_zoo.evaluate.shared import Phase
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.arguments import model_text

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.evaluate.ruler import Questions, RulerReport
    from oscar_zoo.models.loading import Dtype

_PHASES = (Phase("load", "", 1), Phase("measure", "prompts", 9))
"""The seconds are shares."""
FAMILIES: tuple[str, ...] = get_args(Family)
DEFAULT_CACHES = ("bf16", "int2", "int2-hadamard", "artifact")
SHORTEST = 1024
"""Tokens of the shortest prompts by default; the next ones are twice as long, and so on."""
MOST_LENGTHS = 6


def ask_long_prompts(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    families: Sequence[str] = FAMILIES,
    lengths: Sequence[int] = (),
    depths: int = RulerParams.depths,
    samples: int = RulerParams.samples,
    caches: Sequence[str] = DEFAULT_CACHES,
    servers: Sequence[str] = (),
    api_key_file: Path | None = None,
    data: str = RulerParams.data,
    seed: int = RulerParams.seed,
    clip: tuple[float, float] | Clip | None = None,
    device: str | None = None,
    dtype: Dtype = "auto",
    stream_weights: bool | None = None,
    revision: str | None = None,
    hubs: str | Sequence[str] | None = None,
    observer: Observer = SILENT,
) -> RulerReport:
    """Ask for facts in long prompts, over length and depth, with every cache.

    Args: as the options of `oscar-zoo ruler`; `lengths` without any are 1,024 and its doubles up to
        what the model was made for, six at most.

    Returns:
        A report with a cell per family, length and depth; `to_json()` gives plain values.

    Raises:
        MissingDependency: torch or transformers is not installed.
        UsageError: an unknown family, or lengths that the model does not take.
        NotFoundError: there is no such artifact, model or text.
        GeometryMismatch: the artifact was made for another shape of model.
        ServerFailed: a server does not answer.
        NotEnoughMemory: the model does not fit.
    """
    k, v = (None, None) if clip is None else clip if isinstance(clip, tuple) else (clip.k, clip.v)
    params = RulerParams(
        artifact,
        model=None if model is None else model_text(model),
        families=() if tuple(families) == FAMILIES else tuple(families),  # type: ignore[arg-type]
        lengths=",".join(map(str, lengths)) or None,
        depths=depths,
        samples=samples,
        caches=() if tuple(caches) == DEFAULT_CACHES else tuple(caches),  # type: ignore[arg-type]
        servers=tuple(servers),
        api_key_file=api_key_file,
        data=data,
        seed=seed,
        clip=None if clip is None else f"{k},{v}",
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        revision=revision,
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
    )
    return ask(params, observer)


def ask(params: RulerParams, observer: Observer = SILENT) -> RulerReport:
    """Ask the model in this process under every cache, or the servers."""
    lengths, clip = numbers("--lengths", params.lengths), read_clip(params.clip)
    families, caches = params.families or FAMILIES, params.caches or DEFAULT_CACHES
    require_compute()
    from oscar_zoo.app.evaluate import find_subject, load_subject, recipe_of
    from oscar_zoo.serving.prepared import both_sides

    for name in caches:
        if name not in CACHES:
            raise UsageError(f"no cache is called {name!r}.", hint=f"caches: {', '.join(CACHES)}")
    subject = find_subject("ruler", params, observer)
    choice = subject.choice
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.evaluate import ruler
    from oscar_zoo.models.memory import memory_errors
    from oscar_zoo.models.model_source import inspect_model

    ruler.cells_of(families, lengths or (SHORTEST,), params.depths)
    block = inspect_model(choice.source, revision=params.revision, model_id=choice.model_id)
    longest = block.rope.max_position if block.rope else None
    lengths = lengths or doubled(longest)
    ruler.check_lengths(lengths, longest, block.id)
    questions = ruler.Questions(families, lengths, params.depths, params.samples, params.seed)
    if params.servers:
        return _ask_servers(params, questions, subject.text, choice.source, observer)
    observer.begin(_PHASES, timed=False)
    loaded = load_subject(params, subject, observer, longest=max(lengths))
    recipe = recipe_of(subject, loaded.block.geometry).override(clip=clip)
    with memory_errors(loaded.block.id, loaded.device):
        report = ruler.measure_model(
            loaded,
            subject.text,
            questions,
            artifact=both_sides(subject.artifact),
            recipe=recipe,
            caches=caches,
            progress=lambda done, total, unit: observer.advance("measure", done, total, unit),
        )
    observer.begin((), timed=False)
    return report


def doubled(longest: int | None) -> tuple[int, ...]:
    """1,024 and its doubles up to `longest`, six at most; `longest` itself where it is shorter."""
    found = [
        SHORTEST << n for n in range(MOST_LENGTHS) if longest is None or SHORTEST << n <= longest
    ]
    return tuple(found) or (longest or SHORTEST,)


def _ask_servers(
    params: RulerParams, questions: Questions, text: str, source: str, observer: Observer
) -> RulerReport:
    from oscar_zoo.evaluate.caches import encoder
    from oscar_zoo.evaluate.ruler import measure_servers
    from oscar_zoo.models.loading import load_tokenizer
    from oscar_zoo.serving.records import client_of, key_for

    encode = encoder(load_tokenizer(source, revision=params.revision))
    key = key_for(None, params.api_key_file)
    clients = {url: client_of(url, key=key) for url in params.servers}
    observer.begin(_PHASES[1:], timed=False)
    report = measure_servers(
        clients,
        questions.tasks(encode(text), encode),
        questions,
        progress=lambda done, total, unit: observer.advance("measure", done, total, unit),
    )
    observer.begin((), timed=False)
    return report
