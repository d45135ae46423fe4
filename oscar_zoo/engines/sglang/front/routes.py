"""Which routes of SGLang's HTTP server clients reach: one explicit list for each tested release.

A route that is in no list does not exist for clients. A release between two tested ones gets the
list of the earlier one, so that what it adds is closed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GET, POST = frozenset({"GET", "HEAD"}), frozenset({"POST"})
PUT = frozenset({"POST", "PUT"})

Table = Mapping[str, frozenset[str]]
"""Methods by path; `{name}` is one part of a path, and `{name:path}` the rest of it."""

_INFORMATION: Table = {
    "/": GET,
    "/health": GET,
    "/health_generate": GET,
    "/ping": GET,
    "/metrics": GET,
    "/metrics/": GET,
    "/model_info": GET,
    "/get_model_info": GET,
    "/server_info": GET,
    "/get_server_info": GET,
    "/v1/loads": GET,
    "/v1/models": GET,
    "/v1/models/{model:path}": GET,
    "/api/tags": GET,
    "/api/show": POST,
}
_INFERENCE: Table = {
    "/generate": PUT,
    "/tokenize": POST,
    "/detokenize": POST,
    "/v1/completions": POST,
    "/v1/chat/completions": POST,
    "/v1/tokenize": POST,
    "/v1/detokenize": POST,
    "/v1/responses": POST,
    "/v1/responses/{response_id}": GET,
    "/v1/responses/{response_id}/cancel": POST,
    "/v1/messages": POST,
    "/v1/messages/count_tokens": POST,
}
_BOTH = {**_INFORMATION, **_INFERENCE}

OPEN: Mapping[str, Table] = {
    "0.5.17": {
        **_BOTH,
        "/weight_version": GET,
        "/get_weight_version": GET,
        "/get_load": GET,
    },
    "0.5.21": {**_BOTH, "/ready": GET},
    "0.5.23": {**_BOTH, "/ready": GET},
}
"""Routes for everybody who may ask at all, by release."""

# Not Ollama's /api/chat: with transformers 5 these releases fail there, whatever they are asked.
ENGINE_API: Table = {
    "/encode": PUT,
    "/classify": PUT,
    "/invocations": POST,
    "/vertex_generate": POST,
    "/v1/embeddings": POST,
    "/v1/classify": POST,
    "/v1/rerank": PUT,
    "/v1/score": POST,
    "/v1/decisions": POST,
    "/v1/systemone": POST,
    "/api/generate": POST,
}
"""Routes that `--engine-api` opens besides, with all fields of the engine; some releases lack some.
"""

ADMINISTRATION: Table = {
    "/flush_cache": frozenset({"POST"}),
    "/freeze_gc": frozenset({"POST"}),
}
"""Routes for the administration key, which only tools of this user on this machine have: `eval` and
`bench` empty the prefix cache, and SGLang itself freezes its garbage collector after a start."""


@dataclass(frozen=True)
class Routes:
    """A table, ready to be asked for every request.

    Attributes:
        exact: paths without parts that vary.
        templates: the others.
    """

    exact: Table
    templates: tuple[tuple[re.Pattern[str], frozenset[str]], ...]

    @classmethod
    def of(cls, table: Table) -> Routes:
        """Compile `table`."""
        exact = {path: methods for path, methods in table.items() if "{" not in path}
        templates = [(_pattern(path), table[path]) for path in table.keys() - exact.keys()]
        return cls(exact, tuple(templates))

    def has(self, path: str, method: str) -> bool:
        """Whether `method` of `path` is in the table."""
        if path in self.exact:
            return method in self.exact[path]
        return any(method in methods for found, methods in self.templates if found.fullmatch(path))


def open_routes(version: str, *, engine_api: bool = False) -> Routes:
    """The routes that clients of SGLang `version` reach."""
    return Routes.of({**OPEN[_nearest(version, OPEN)], **(ENGINE_API if engine_api else {})})


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+(:path)?\}", path)
    texts, kinds = parts[::2], parts[1::2]
    found = re.escape(texts[0])
    for kind, text in zip(kinds, texts[1:], strict=True):
        found += (".+" if kind else "[^/]+") + re.escape(text)
    return re.compile(found)


def _nearest(version: str, releases: Iterable[str]) -> str:
    """The last of `releases` that is not after `version`, else the first of them."""
    ordered = sorted(releases, key=_number)
    before = [one for one in ordered if _number(one) <= _number(version)]
    return before[-1] if before else ordered[0]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
