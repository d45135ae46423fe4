"""Ask a model, or running servers, for facts in long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.arguments import clip_of, clip_word, command_line, model_text, option_words
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.phases import Phase
from oscar_zoo.observer import SILENT, Observer

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.evaluate.long_context.grid import RulerReport
    from oscar_zoo.evaluate.long_context.run import Questions
    from oscar_zoo.models.loading import Dtype

_PHASES = (Phase("load", "", 1), Phase("measure", "prompts", 9))
"""The seconds are shares."""
FAMILIES = (
    "single", "multi-key", "multi-value", "multi-query", "variables", "common-words", "documents",
)  # fmt: skip
CACHES = ("bf16", "int2", "int2-hadamard", "int2-hadamard-clip", "artifact")
DEFAULT_CACHES = ("bf16", "int2", "int2-hadamard", "artifact")
SHORTEST = 1024
"""Tokens of the shortest prompts by default; the next ones are twice as long, and so on."""
MOST_LENGTHS = 6


@dataclass(frozen=True)
class RulerRequest:
    """What to ask.

    Attributes:
        artifact: name of an artifact, or its folder.
        model: folder, name of the zoo or hub id; `None` for the artifact's base model.
        families: kinds of prompts, of `FAMILIES`.
        lengths: tokens of the prompts; empty for 1,024 and its doubles up to what the model was
            made for, six at most.
        depths: places of the fact that is asked for.
        samples: prompts for each family, length and depth.
        caches: what to compare, of `CACHES`.
        servers: addresses of running servers to ask in place of the model.
        api_key_file: file with the key that the servers want.
        data: filler: a text file, or a text known by name.
        seed: the same seed gives the same prompts.
        clip: clip ratios in place of the recipe's.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        revision: commit, branch or tag of a model on a hub.
        hubs: hubs to look for the artifact in, in order; without any, the configured ones.
    """

    artifact: str | Path
    model: str | None = None
    families: tuple[str, ...] = FAMILIES
    lengths: tuple[int, ...] = ()
    depths: int = 5
    samples: int = 4
    caches: tuple[str, ...] = DEFAULT_CACHES
    servers: tuple[str, ...] = ()
    api_key_file: Path | None = None
    data: str = "manuals"
    seed: int = 0
    clip: Clip | None = None
    device: str | None = None
    dtype: Dtype = "auto"
    stream_weights: bool | None = None
    revision: str | None = None
    hubs: tuple[str, ...] = ()

    def command_line(self, model: str) -> str:
        """The command line that means this request with the model `model`."""
        usual = RulerRequest
        stream = self.stream_weights
        options: dict[str, Any] = {
            "model": model,
            "family": () if self.families == usual.families else self.families,
            "lengths": ",".join(map(str, self.lengths)) or None,
            "depths": None if self.depths == usual.depths else self.depths,
            "samples": None if self.samples == usual.samples else self.samples,
            "cache": () if self.caches == usual.caches else self.caches,
            "url": self.servers,
            "api-key-file": self.api_key_file,
            "data": None if self.data == usual.data else self.data,
            "seed": None if self.seed == usual.seed else self.seed,
            "clip": clip_word(self.clip),
            "device": self.device,
            "dtype": None if self.dtype == usual.dtype else self.dtype,
            "stream-weights": stream is True,
            "no-stream-weights": stream is False,
            "revision": self.revision,
            "hub": self.hubs,
        }
        return command_line(["ruler", str(self.artifact), *option_words(options)])


def ask_long_prompts(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    families: Sequence[str] = RulerRequest.families,
    lengths: Sequence[int] = (),
    depths: int = RulerRequest.depths,
    samples: int = RulerRequest.samples,
    caches: Sequence[str] = RulerRequest.caches,
    servers: Sequence[str] = (),
    api_key_file: Path | None = None,
    data: str = RulerRequest.data,
    seed: int = RulerRequest.seed,
    clip: tuple[float, float] | Clip | None = None,
    device: str | None = None,
    dtype: Dtype = RulerRequest.dtype,
    stream_weights: bool | None = None,
    revision: str | None = None,
    hubs: str | Sequence[str] | None = None,
    observer: Observer = SILENT,
) -> RulerReport:
    """Ask for facts in long prompts, over length and depth, with every cache.

    Args: as the attributes of `RulerRequest`.

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
    request = RulerRequest(
        artifact=artifact,
        model=None if model is None else model_text(model),
        families=tuple(families),
        lengths=tuple(lengths),
        depths=depths,
        samples=samples,
        caches=tuple(caches),
        servers=tuple(servers),
        api_key_file=api_key_file,
        data=data,
        seed=seed,
        clip=clip_of(clip),
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        revision=revision,
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
    )
    return ask(request, observer)


def ask(request: RulerRequest, observer: Observer = SILENT) -> RulerReport:
    """Ask the model in this process under every cache, or the servers."""
    require_compute()
    from oscar_zoo.app.evaluated_model import find_subject, load_subject, recipe_of
    from oscar_zoo.serving.prepared import both_sides

    _check_caches(request)
    subject = find_subject(request, observer)
    choice = subject.choice
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.evaluate.long_context.grid import cells_of

    cells_of(request.families, request.lengths or (SHORTEST,), request.depths)
    from oscar_zoo.evaluate.long_context import run
    from oscar_zoo.models.memory import memory_errors
    from oscar_zoo.models.model_source import inspect_model

    block = inspect_model(choice.source, revision=request.revision, model_id=choice.model_id)
    longest = block.rope.max_position if block.rope else None
    lengths = request.lengths or doubled(longest)
    run.check_lengths(lengths, longest, block.id)
    questions = run.Questions(
        request.families, lengths, request.depths, request.samples, request.seed
    )
    if request.servers:
        return _ask_servers(request, questions, subject.text, choice.source, observer)
    observer.begin(_PHASES, timed=False)
    loaded = load_subject(request, subject, observer, longest=max(lengths))
    recipe = recipe_of(subject, loaded.block.geometry).override(clip=request.clip)
    with memory_errors(loaded.block.id, loaded.device):
        report = run.measure_model(
            loaded,
            subject.text,
            questions,
            artifact=both_sides(subject.artifact),
            recipe=recipe,
            caches=request.caches,
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


def _check_caches(request: RulerRequest) -> None:
    for name in request.caches:
        if name not in CACHES:
            raise UsageError(f"no cache is called {name!r}.", hint=f"caches: {', '.join(CACHES)}")


def _ask_servers(
    request: RulerRequest,
    questions: Questions,
    text: str,
    source: str,
    observer: Observer,
) -> RulerReport:
    from oscar_zoo.evaluate.long_context import run
    from oscar_zoo.models.loading import load_tokenizer
    from oscar_zoo.serving.records import client_of, key_for

    tokenizer = load_tokenizer(source, revision=request.revision)

    def encode(words: str) -> list[int]:
        ids: list[int] = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    key = key_for(None, request.api_key_file)
    clients = {url: client_of(url, key=key) for url in request.servers}
    observer.begin(_PHASES[1:], timed=False)
    report = run.measure_servers(
        clients,
        questions.tasks(encode(text), encode),
        questions,
        progress=lambda done, total, unit: observer.advance("measure", done, total, unit),
    )
    observer.begin((), timed=False)
    return report
