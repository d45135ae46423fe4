"""oscar-zoo: registry, hub tooling and SGLang plugin for 2-bit KV caches.

    import oscar_zoo

    artifact = oscar_zoo.pull("Qwen3-8B")
    k, v = artifact.rotations()

Every call takes hubs as people write them (`hf:ORG/REPO[@REV]`, `ms:ORG/REPO`, `file:PATH`), raises
the errors of `oscar_zoo.errors` and prints nothing. `oscar-zoo.lock` is read and written only where
`lock` names it. Importing this package loads no library: a call is loaded when it is first used,
and only those that compute or evaluate need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oscar_zoo.version import __version__

if TYPE_CHECKING:
    from oscar_zoo.compute.compute import compute_artifact
    from oscar_zoo.compute.fit import draw_report, fit, merge_moments
    from oscar_zoo.compute.serve import serve
    from oscar_zoo.evaluate.benchmarks.suite import benchmark_artifact
    from oscar_zoo.evaluate.in_process import (
        evaluate_against,
        evaluate_artifact,
        evaluate_sessions,
    )
    from oscar_zoo.evaluate.ruler import ask_long_prompts
    from oscar_zoo.registry.artifacts import Artifact
    from oscar_zoo.registry.mirror import mirror
    from oscar_zoo.registry.publish import publish
    from oscar_zoo.registry.pull import pull
    from oscar_zoo.registry.verify import verify
    from oscar_zoo.serving.fit_gpu import fit_gpu
    from oscar_zoo.serving.serve import RunningServer
    from oscar_zoo.site.build import build_site
    from oscar_zoo.site.cache import installed
    from oscar_zoo.site.card import card
    from oscar_zoo.site.compare import compare
    from oscar_zoo.site.info import scores
    from oscar_zoo.site.listing import leaderboard, list_artifacts, search
    from oscar_zoo.site.status import add_scores, deprecate, unyank, yank

_CALLS = {
    "Artifact": "registry.artifacts",
    "RunningServer": "serving.serve",
    "add_scores": "site.status",
    "benchmark_artifact": "evaluate.benchmarks.suite",
    "build_site": "site.build",
    "card": "site.card",
    "compare": "site.compare",
    "ask_long_prompts": "evaluate.ruler",
    "compute_artifact": "compute.compute",
    "deprecate": "site.status",
    "draw_report": "compute.fit",
    "evaluate_against": "evaluate.in_process",
    "evaluate_artifact": "evaluate.in_process",
    "evaluate_sessions": "evaluate.in_process",
    "fit": "compute.fit",
    "fit_gpu": "serving.fit_gpu",
    "installed": "site.cache",
    "leaderboard": "site.listing",
    "list_artifacts": "site.listing",
    "merge_moments": "compute.fit",
    "mirror": "registry.mirror",
    "publish": "registry.publish",
    "pull": "registry.pull",
    "scores": "site.info",
    "search": "site.listing",
    "serve": "compute.serve",
    "unyank": "site.status",
    "verify": "registry.verify",
    "yank": "site.status",
}
"""Each public name, and the module of this package that has it."""

__all__ = [
    "Artifact",
    "RunningServer",
    "__version__",
    "add_scores",
    "ask_long_prompts",
    "benchmark_artifact",
    "build_site",
    "card",
    "compare",
    "compute_artifact",
    "deprecate",
    "draw_report",
    "evaluate_against",
    "evaluate_artifact",
    "evaluate_sessions",
    "fit",
    "fit_gpu",
    "installed",
    "leaderboard",
    "list_artifacts",
    "merge_moments",
    "mirror",
    "publish",
    "pull",
    "scores",
    "search",
    "serve",
    "unyank",
    "verify",
    "yank",
]


def __getattr__(name: str) -> Any:
    if name not in _CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"oscar_zoo.{_CALLS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
