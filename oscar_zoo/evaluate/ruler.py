"""Facts in long prompts: every family at every length and depth, under every cache of a model in
this process, or asked of running servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from oscar_zoo.artifact.specs import read_clip
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.in_process import find_subject, load_subject
from oscar_zoo.evaluate.outcome import AskedServer, Cell, LengthRow, RulerReport
from oscar_zoo.evaluate.params import Family, RulerParams, from_python, numbers
from oscar_zoo.evaluate.shared import Phase, Progress, ticking
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.serving.artifact_model import both_sides
from oscar_zoo.serving.records import client_of, key_for
from oscar_zoo.verb import shows

if TYPE_CHECKING:
    from oscar_zoo.evaluate.questions import Recall
    from oscar_zoo.evaluate.ruler_prompts import Place
    from oscar_zoo.evaluate.simulated_cache import CacheSpec

T = TypeVar("T")
FAMILIES: tuple[Family, ...] = get_args(Family)
DEFAULT_CACHES = ("bf16", "int2", "int2-hadamard", "artifact")
SHORTEST, MOST_LENGTHS = 1024, 6
"""Tokens of the shortest prompts by default, of which the next ones are doubles, and how many."""
_MEASURING = Phase("measure", "tokens", 30)
_ASKING = Phase("measure", "answers", 1)
"""The seconds are shares."""


@shows(RulerParams)
def ask_long_prompts(
    artifact: str | Path, *, observer: Observer = SILENT, **options: Any
) -> RulerReport:
    """Ask for facts in long prompts, over length and depth, with every cache.

    Args:
        artifact: name of an artifact, or its folder.
        observer: hears of progress and remarks.
        options: those of `oscar-zoo ruler`, by the names of their fields in `RulerParams`;
            `lengths` may be a list of numbers, and `clip` a pair of them.
    """
    return ask(from_python(RulerParams, artifact, options), observer)


def ask(params: RulerParams, observer: Observer = SILENT) -> RulerReport:
    lengths, clip = numbers("--lengths", params.lengths), read_clip(params.clip)
    require_compute()
    subject = find_subject("ruler", params, observer)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.evaluate.caches import bits_at, caches_of, encoder, facts_of
    from oscar_zoo.evaluate.measure import measure
    from oscar_zoo.evaluate.ruler_prompts import places_of, write_prompts
    from oscar_zoo.models.memory import memory_errors

    block = subject.block
    longest = block.rope.max_position if block.rope else None
    lengths = lengths or doubled(longest)
    places = places_of(params.families or FAMILIES, lengths, params.depths)
    check_lengths(lengths, longest, block.id)
    size: dict[str, Any] = {"depths": params.depths, "samples": params.samples, "seed": params.seed}

    def tell(done: int, total: int, unit: str) -> None:
        observer.advance("measure", done, total, unit)

    if params.servers:
        from oscar_zoo.models.loading import load_tokenizer

        encode = encoder(load_tokenizer(subject.choice.source, revision=params.revision))
        key = key_for(None, params.api_key_file)
        clients = {url: client_of(url, key=key) for url in params.servers}
        observer.begin((_ASKING,), timed=False)
        tasks = write_prompts(places, encode(subject.text), encode, **size)
        report = measure_servers(clients, tasks, size, progress=tell)
        observer.begin((), timed=False)
        return report
    observer.begin((Phase("load", "", 1), _MEASURING), timed=False)
    model = load_subject(params, subject.choice, observer, longest=max(lengths))
    recipe = subject.recipe.override(clip=clip)
    with memory_errors(block.id, model.device):
        known = caches_of(block, both_sides(subject.artifact), recipe)
        specs = {name: known[name] for name in params.caches or DEFAULT_CACHES}
        encode = encoder(model.tokenizer)
        tasks = write_prompts(places, encode(subject.text), encode, **size)
        total = sum(len(prompt.ids) for task in tasks.values() for prompt in task.prompts)
        tick = ticking(tell, len(specs) * total, "tokens")  # the first prompts are the shortest

        def right(task: Recall, spec: CacheSpec | None) -> int:
            lengths = iter([len(prompt.ids) for prompt in task.prompts])
            found = measure(model, task, spec, tick=lambda: tick(next(lengths)))
            return int(sum(n for n, _ in found.parts))

        cells = count_cells(tasks, specs, right)
    observer.begin((), timed=False)
    rows = length_rows(cells, lambda cache, length: bits_at(specs[cache], block, length))
    return RulerReport(cells=cells, rows=rows, **size, **facts_of(model, subject.text, recipe))


def doubled(longest: int | None) -> tuple[int, ...]:
    """1,024 and its doubles up to `longest`, six at most; `longest` itself where it is shorter."""
    found = [SHORTEST << n for n in range(MOST_LENGTHS)]
    return tuple(n for n in found if longest is None or n <= longest) or (longest or SHORTEST,)


def check_lengths(lengths: Sequence[int], longest: int | None, of: str) -> None:
    if longest is not None and max(lengths) > longest:
        raise UsageError(
            f"{of} takes {longest:,} tokens, and prompts of {max(lengths):,} are wanted.",
            hint=f"--lengths up to {longest}",
        )


def measure_servers(
    clients: Mapping[str, ServerClient],
    tasks: Mapping[Place, Recall],
    size: dict[str, Any],
    *,
    progress: Progress = lambda done, total, unit: None,
) -> RulerReport:
    """Ask running servers: an answer is right when the greedy answer of the server begins with it,
    after the prompt and the true answers before it."""
    from oscar_zoo.evaluate.questions import places_of

    facts = {name: client.facts() for name, client in clients.items()}
    for name, client in clients.items():
        check_lengths([place[1] for place in tasks], facts[name].longest_input, client.url)
    each = sum(len(prompt.answers) for task in tasks.values() for prompt in task.prompts)
    tick = ticking(progress, len(clients) * each, "answers")

    def right(task: Recall, client: ServerClient) -> int:
        count = 0
        for prompt in task.prompts:
            ids = prompt.ids.tolist()
            for start, end in places_of(prompt):
                count += list(client.generate(ids[:start], end - start).ids) == ids[start:end]
                tick()
        return count

    cells = count_cells(tasks, clients, right)
    servers = {
        name: AskedServer(clients[name].url, one.version, one.cache_dtype, one.recipe)
        for name, one in facts.items()
    }
    rows = length_rows(cells, lambda *_: None)
    return RulerReport(cells=cells, rows=rows, servers=servers, **size)


def count_cells(
    tasks: Mapping[Place, Recall], caches: Mapping[str, T], count_right: Callable[[Recall, T], int]
) -> tuple[Cell, ...]:
    return tuple(
        Cell(*place, cache, count_right(task, one), sum(len(p.answers) for p in task.prompts))
        for cache, one in caches.items()
        for place, task in tasks.items()
    )


def length_rows(
    cells: Sequence[Cell], bits: Callable[[str, int], float | None]
) -> tuple[LengthRow, ...]:
    """A row per cache and length: the mean over the families; `bits` are per element with windows,
    of `(cache, length)`."""
    report = RulerReport(cells=tuple(cells), rows=(), depths=0, samples=0, seed=0)
    rows = []
    for cache, length in product(report.caches, report.lengths):
        shares = [report.share(cache, family=name, length=length) for name in report.families]
        mean = sum(share or 0.0 for share in shares) / len(shares)
        rows.append(LengthRow(cache, length, mean, bits(cache, length)))
    return tuple(rows)
