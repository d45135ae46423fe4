"""The SGLang engine that calibrates: which program to start, how it runs its sequences, and what to
do when it fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from oscar_zoo.compute.capture.engine_session import EngineProgram
from oscar_zoo.engines.sglang import capture_process
from oscar_zoo.engines.sglang.launch.capture_flags import command_line
from oscar_zoo.engines.sglang.launch.failure_cause import cause_in
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import ComputeFailed, FlagRefused, OscarZooError

NEXT_STEPS = (
    (
        r"memory",
        "use more GPUs (--tensor-parallel), shorter sequences (--seq-len), or another share of the"
        " memory: -- --mem-fraction-static=0.8",
    ),
    (
        r"import FA3|FlashAttention|flash_?attn|flash_?infer|attention backend",
        "choose an attention backend that runs here: -- --attention-backend=flashinfer (or triton)",
    ),
    (
        r"oscar_tap",
        "the plugin was not loaded: pip install oscar-zoo beside a supported version of sglang",
    ),
    (r"", "try to serve the model with this SGLang first"),
)
"""What to do about a cause, by words in it; the first row whose words are found counts."""


def capture_program(
    environment: Mapping[str, str], flags: UserFlags | None = None
) -> EngineProgram:
    """The program for `compute`.

    Args:
        environment: of a server; see `launch.environment.child_environment`.
        flags: SGLang's flags of a user; see `launch.capture_flags.read_flags`.
    """
    variables = {
        "SGLANG_PLUGINS": "oscar",
        # a sequence may be as long as the context of the model, and `ROOM` comes on top
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    return EngineProgram(
        engine="sglang",
        command=(sys.executable, "-P", "-m", capture_process.__name__),
        environment={**environment, **variables},
        arguments=partial(command_line, flags=flags or UserFlags()),
        failure=_failure,
    )


def _failure(log: Path, model: str) -> OscarZooError:
    """Why the engine that wrote `log` could not run `model`, and what to do about it."""
    cause = cause_in(log)
    if cause.by_parser:
        return FlagRefused.for_flags(cause.text)
    known = next(step for words, step in NEXT_STEPS if re.search(words, cause.text, re.IGNORECASE))
    return ComputeFailed(f"SGLang could not run {model}: {cause.text}.", hint=cause.hint or known)
