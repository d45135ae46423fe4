"""No request ends a server: requests of every shape to stock SGLang with the plugin."""

from __future__ import annotations

import http.client
import importlib.util
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiment import Found, Scale
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from request_fuzz import WORKING, requests

REQUESTS, FEW = 20_000, 160
"""Of all releases together, and of the installed one."""
AT_ONCE = 8
PROMPTS = ([5, 6, 7], list(range(100, 180)), [11])
SEED = 20261124


def lacking_sglang() -> str | None:
    """Why this cannot run here."""
    return None if importlib.util.find_spec("sglang") else "SGLang is not installed"


def end_no_server(scale: Scale) -> Found:
    """Send requests that hypothesis makes, eight at once, to one server of each release."""
    from engines import INSTALLED, RELEASES

    releases = RELEASES if scale.whole else (INSTALLED,)
    each = -(-REQUESTS // len(RELEASES)) if scale.whole else FEW
    violations: list[str] = []
    counts: Counter[str] = Counter()
    for release in releases:
        violations += _release(scale, release, each, counts)
    figures: dict[str, int | float | str] = {"requests": counts.total()}
    figures |= {f"answered {status}": counts[status] for status in sorted(counts)}
    figures["releases"] = ", ".join(releases)
    return Found(figures, tuple(violations[:50]))


def _release(scale: Scale, release: str, number: int, counts: Counter[str]) -> list[str]:
    from engines import folder_of
    from sglang_forks import connect
    from sglang_http import http_server
    from tiny_artifacts import payload, write_folder

    folder = scale.work / release
    folder.mkdir()
    out, log = folder / "schemas", folder / "schemas.log"
    forks = connect(folder_of(release))
    assert forks.call("request_schemas:write", folder, log, out=str(out)) == 0, log.read_text()
    forks.close()
    made = requests(json.loads(out.read_text()))
    pair = write_folder(folder / "pair", payload())
    flags = ("--kv-cache-dtype=int2", f"--oscar-rotation-path={pair}", "--oscar-front=on")
    with http_server(release, folder, *flags) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        broken = {path for path, body in WORKING.items() if _status(server, path, body) == "500"}
        before = [server.tokens(prompt) for prompt in PROMPTS]
        violations: list[str] = []

        @seed(SEED)
        @settings(
            max_examples=-(-number // AT_ONCE),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(made, min_size=AT_ONCE, max_size=AT_ONCE))
        def ask(several: list[tuple[str, dict[str, Any]]]) -> None:
            if violations:
                return
            for (path, body), status in zip(
                several, pool.map(lambda one: _status(server, *one), several), strict=True
            ):
                counts[status] += 1
                if status == "500" and path in broken:
                    continue  # SGLang fails here whatever it is asked
                if status not in ("200", "400", "404", "413", "422"):
                    said = json.dumps(body, default=str)[:500]
                    violations.append(f"{release} {path} {status}: {said}")

        began = time.monotonic()
        ask()
        print(f"  {release}: {time.monotonic() - began:.0f} s", flush=True)
        try:
            after = [server.tokens(prompt) for prompt in PROMPTS]
        except (OSError, AssertionError, http.client.HTTPException) as error:
            violations.append(f"{release}: the server is gone: {error!r}")
        else:
            if after != before:
                violations.append(f"{release}: other tokens than before: {before} {after}")
        return violations


def _status(server: Any, path: str, body: dict[str, Any]) -> str:
    try:
        return str(server.ask("POST", path, body)[0])
    except (OSError, http.client.HTTPException) as error:
        return f"no answer ({type(error).__name__})"
