"""The program that holds a tapped SGLang engine: `python -m ... SETUP.json`.

`compute/capture/engine_session.py` starts it with an `EngineSetup` in a file and sends jobs to its
standard input, one JSON object per line. When that input ends, the parent is gone and the program
ends too. News go to standard output, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.engine_job import JOB, EndJob, EngineSetup
from oscar_zoo.engines.sglang.compat import offline_engine
from oscar_zoo.engines.sglang.tapped_engine import TappedEngine
from oscar_zoo.errors import OscarZooError


def _main() -> None:
    setup = EngineSetup.model_validate_json(Path(sys.argv[1]).read_bytes())
    jobs: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(setup.folder, jobs), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what SGLang prints belongs in the log

        def tell(**news: Any) -> None:
            out.write(json.dumps(news) + "\n")
            out.flush()

        try:
            _serve(setup, jobs, tell)
        except OscarZooError as error:
            ranks.write_failure(Path(setup.folder), "engine", error)
            tell(failed=True)
        except Exception as error:  # the engine's own error types are not public
            traceback.print_exc()
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(line, file=sys.stderr, flush=True)  # the parent looks for a cause in the log
            tell(failed=True)


def _receive(folder: str, jobs: queue.Queue[bytes]) -> None:
    """Read jobs; end this process group when the parent is gone: then standard input reaches its
    end.

    The private folder is removed too, because the parent can no longer do it.
    """
    rest = b""
    while chunk := os.read(0, 1 << 20):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            jobs.put(line)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _serve(setup: EngineSetup, jobs: queue.Queue[bytes], tell: Callable[..., None]) -> None:
    """Start the engine and run the jobs until the last one."""
    engine = offline_engine.open_engine(setup.arguments)
    try:
        tapped = TappedEngine(engine, setup.folder, offline_engine.release())
        while not isinstance(job := JOB.validate_json(jobs.get()), EndJob):
            tell(done=tapped.run(job, lambda *state: tell(progress=state)))
    finally:
        engine.shutdown()
    tell(done=None)


if __name__ == "__main__":
    _main()
