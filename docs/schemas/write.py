"""Complete the JSON Schemas in this folder: give every file the definitions that it refers to.

    python docs/schemas/write.py

Each file is made of the type of its outcome (`GENERATED`). Definitions of manifests, recipes,
scores and reports are made from the package's own models, and copied into the `$defs` of every file
that refers to them, so that each file is complete. Running it twice changes nothing, and a test
compares the files with what it makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from oscar_zoo.artifact.manifest import Manifest, Status
from oscar_zoo.artifact.outcome import VerifyReport
from oscar_zoo.artifact.specs import Score, ServingRecipe
from oscar_zoo.compute.outcome import ComputeResult, Drawn, FitResult, MergeResult
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.evaluate.bench.load import LoadReport
from oscar_zoo.evaluate.bench.report import Report
from oscar_zoo.evaluate.outcome import (
    AgainstReport,
    BenchmarkReport,
    EvalReport,
    RulerReport,
    ServerReport,
    SessionsReport,
)
from oscar_zoo.registry.changes import ErrorReport
from oscar_zoo.registry.login import Account
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.mirror import MirrorReport
from oscar_zoo.registry.publish import PublishReport
from oscar_zoo.registry.pull import PullReport
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.serving.chat import Answer
from oscar_zoo.serving.doctor import DoctorReport
from oscar_zoo.serving.fit_gpu import FitReport
from oscar_zoo.serving.serve import ReadyServer, ServeCommand
from oscar_zoo.serving.servers import LogsReport, PsReport, StopReport
from oscar_zoo.site import cache
from oscar_zoo.site.build import BuiltSite
from oscar_zoo.site.card import Card
from oscar_zoo.site.compare import Comparison
from oscar_zoo.site.info import Description, ScoresReport
from oscar_zoo.site.listing import Found, Leaderboard, Listing
from oscar_zoo.site.status import AddedScores, StatusReport
from oscar_zoo.verb import schema_of

HERE = Path(__file__).resolve().parent
WIDTH = 100
"""Columns of a line, as far as one value fits."""
WRITTEN_IN_FULL: tuple[type[BaseModel], ...] = (
    Manifest,
    Measured,
    ModelRecipe,
    Score,
    ServingRecipe,
    Status,
)
"""Models whose output has every key, also those that are null."""
MAY_BE_ABSENT = {
    "Manifest": ("registry", "statistics", "quality"),
    "ServingRecipe": ("widths",),
    **dict.fromkeys(("Geometry", "ModelBlock"), ("rotary_key",)),
    "Score": tuple(
        key
        for key in Score.model_fields
        if key not in Score(task="x", value=None, kv_dtype="int2", reporter="measured").model_dump()
    ),
}
"""Keys of theirs that are left out where they say nothing."""


class _Plain(GenerateJsonSchema):
    """Schemas without titles, which repeat the names, and without defaults of inputs."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def files() -> list[Path]:
    """The schemas of outputs."""
    return [HERE / f"{name}.json" for name in sorted(GENERATED)]


def definitions() -> dict[str, Any]:
    """Every shared definition by its name."""
    found: dict[str, Any] = {}
    for model in (*WRITTEN_IN_FULL, ReportData):
        blocks = model.model_json_schema(by_alias=True, schema_generator=_Plain)
        inner = blocks.pop("$defs", {})
        # A recursive model is a reference to one of its own definitions.
        whole = inner if "$ref" in blocks else inner | {model.__name__: blocks}
        for name, block in whole.items():
            made = _described(block)
            if model is not ReportData and "properties" in made:
                absent = MAY_BE_ABSENT.get(name, ())
                made["required"] = [key for key in made["properties"] if key not in absent]
            assert found.setdefault(name, made) == made, f"two definitions of {name}"
    return found


def complete(schema: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """`schema` with all definitions that it refers to, its own first."""
    own = {name: part for name, part in schema.pop("$defs", {}).items() if name not in shared}
    known, needed = own | shared, list(_references(schema))
    for name in needed:  # grows while it is walked
        needed += [further for further in _references(known[name]) if further not in needed]
    chosen = [*(name for name in own if name in needed), *sorted({*needed} - {*own})]
    return schema | ({"$defs": {name: known[name] for name in chosen}} if chosen else {})


def text(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON in which whatever fits in a line has one.

    Args:
        indent: columns before its lines.
        before: columns that its first line has already.
    """
    line = json.dumps(value, ensure_ascii=False)
    if indent + before + len(line) < WIDTH or not value or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 1)
    if isinstance(value, list):
        parts, ends = [text(item, indent + 1) for item in value], "[]"
    else:
        keys = {key: f"{json.dumps(key)}: " for key in value}
        parts, ends = [keys[k] + text(v, indent + 1, len(keys[k])) for k, v in value.items()], "{}"
    body = ",\n".join(inner + part for part in parts)
    return f"{ends[0]}\n{body}\n{' ' * indent}{ends[1]}"


GENERATED: dict[str, tuple[str, type]] = {
    "error-1": ("An error", ErrorReport),
    "compute-1": ("A computed artifact", ComputeResult),
    "fit-1": ("A fitted artifact", FitResult),
    "merge-1": ("Merged moments", MergeResult),
    "plot-1": ("A drawn report", Drawn),
    "eval-1": ("A measured cache", EvalReport),
    "eval-against-1": ("Caches side by side", AgainstReport),
    "eval-benchmark-1": ("Scores of benchmarks", BenchmarkReport),
    "eval-sessions-1": ("Caches over sessions of an agent", SessionsReport),
    "eval-server-1": ("Measured servers", ServerReport),
    "ruler-1": ("Facts in long prompts", RulerReport),
    "cache-dir-1": ("The folder of the store", cache.CacheFolder),
    "cache-gc-1": ("Freed space", cache.Freed),
    "cache-list-1": ("Stored artifacts", cache.Stored),
    "cache-rm-1": ("Removed artifacts", cache.RemovedArtifacts),
    "cache-verify-1": ("Checked artifacts", cache.CacheChecks),
    "card-1": ("A card", Card),
    "compare-1": ("Two artifacts", Comparison),
    "info-1": ("A model or artifact", Description),
    "leaderboard-1": ("A leaderboard", Leaderboard),
    "list-1": ("Artifacts", Listing),
    "scores-added-1": ("Attached scores", AddedScores),
    "scores-of-1": ("Scores", ScoresReport),
    "search-1": ("Found artifacts", Found),
    "site-1": ("A built page", BuiltSite),
    "status-1": ("Changed versions", StatusReport),
    "login-1": ("A login", Account),
    "mirror-1": ("Mirrored artifacts", MirrorReport),
    "publish-1": ("Published versions", PublishReport),
    "pull-1": ("Pulled artifacts", PullReport),
    "verify-1": ("Verified artifacts", VerifyReport),
    "bench-load-1": ("A server under load", LoadReport),
    "bench-serve-2": ("Caches compared", Report),
    "chat-1": ("An answer", Answer),
    "logs-1": ("The log of a server", LogsReport),
    "ps-1": ("Servers that run, and servers that ended by themselves", PsReport),
    "doctor-1": ("What was looked at", DoctorReport),
    "fit-gpu-1": ("What GPUs hold", FitReport),
    "serve-1": ("A server that is ready", ReadyServer),
    "serve-command-1": ("The command of a server", ServeCommand),
    "stop-1": ("A stopped server", StopReport),
}
"""The type that each schema is made of: nobody writes one by hand."""


def made(file: Path, shared: dict[str, Any]) -> str:
    """What `file` has to hold."""
    title, outcome = GENERATED[file.stem]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    written = json.dumps(head | schema_of(outcome)).replace('"x-ref": "', '"$ref": "#/$defs/')
    return text(complete(json.loads(written), shared)) + "\n"


def _described(block: dict[str, Any]) -> dict[str, Any]:
    """A block of a model, with the text of each attribute at its property."""
    block = {key: value for key, value in block.items() if key != "title"}
    said, _, attributes = block.get("description", "").partition("Attributes:")
    if said:
        block["description"] = " ".join(said.split())
    for names, about in re.findall(
        r"^ {4}([a-z_0-9, ]+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE
    ):
        for name in names.split(", "):
            block["properties"][name] |= {"description": " ".join(about.split())}
    return block


def _references(value: Any) -> Iterator[str]:
    """Names of the definitions that a schema refers to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.removeprefix("#/$defs/")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


if __name__ == "__main__":
    everything = definitions()
    for schema in files():
        schema.write_text(made(schema, everything), "utf-8")
