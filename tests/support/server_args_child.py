"""Read command lines as `python -m sglang.launch_server` does, many in one fork of `sglang_forks`.

A case is `{"argv": [...], "env": {...}}`. Nothing is started; an answer says what was decided, or
what was refused.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock


def read(cases: list[dict[str, Any]], out: str) -> None:
    """Answers to all `cases`, and the flags of this version; JSON in the file `out`."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = sorted({option for action in parser._actions for option in action.option_strings})
    Path(out).write_text(json.dumps({"flags": flags, "cases": [answer(case) for case in cases]}))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    from oscar_zoo.engines.sglang import compile_ahead, worker
    from oscar_zoo.engines.sglang.compat import server_arguments
    from oscar_zoo.errors import OscarZooError

    worker.served.cache_clear()
    with mock.patch.dict(os.environ, case["env"]):
        try:
            args = prepare_server_args(case["argv"])
            if hasattr(args, "resolve_once"):
                args.resolve_once()
            args.check_server_args()  # as the engine does in front of its workers
            config = server_arguments.resolved(args)
            chosen, artifact = worker.served()
            ahead = json.loads(compile_ahead.request(args, config).model_dump_json())
        except OscarZooError as error:
            return {"error": error.message, "hint": error.hint}
        except SystemExit as error:
            return {"error": f"exit {error.code}", "hint": None}
        return {
            "digest": artifact.digest,
            "copy_digest": artifact.copy_digest,
            "settings": chosen.describe(),
            "warnings": chosen.warnings,
            "backend": config.attention_backend,
            "backends": [
                getattr(config, f"{phase}attention_backend")
                for phase in ("", "prefill_", "decode_")
            ],
            "where": artifact.where,
            "tp": config.tp_size,
            "ahead": ahead,
            "graphs": [config.cuda_graph_backend_decode, config.cuda_graph_backend_prefill],
        }


def parser(out: str) -> None:
    """The flags that the parser of this SGLang takes without a plugin; JSON in the file `out`."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = sorted({option for action in parser._actions for option in action.option_strings})
    package = str(Path(sglang.__file__).parent)
    Path(out).write_text(
        json.dumps({"flags": flags, "package": package, "version": sglang.__version__})
    )


def names(out: str) -> None:
    """Which of the names in the table of releases this SGLang has; JSON in the file `out`."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from oscar_zoo.engines.sglang.compat.releases import ALLOCATE_ROWS, RESOLVE

    places = ((RESOLVE, ServerArgs), (ALLOCATE_ROWS, ReqToTokenPool))
    Path(out).write_text(json.dumps([row.name(place) for row, place in places]))
