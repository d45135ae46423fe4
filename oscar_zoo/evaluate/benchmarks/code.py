"""Runs a program that a model wrote, for benchmarks that judge code.

The program is a process of its own in an empty folder, with few variables, limited time and memory.
That is no sandbox: it may use the network and read what this user may read. The caller has asked
the user whether it may run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from oscar_zoo import children

SECONDS = 10.0
"""A program may take this long."""
MEMORY = 4 << 30
"""Bytes of address space."""

_PASSED = 86
"""Exit code behind the tests: a program that ends Python itself has not passed."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_RUNNER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({int(SECONDS)}, {int(SECONDS)}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {1 << 20}))
with open(sys.argv[1], encoding="utf-8") as stream:
    exec(compile(stream.read(), "answer", "exec"), {{"__name__": "__main__"}})
sys.exit({_PASSED})
"""


def programs(answers: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """A filter of the harness: the solutions in `answers`, each ready for the tests of its `doc`.

    A solution is the last code block of an answer that defines the wanted function, with the lines
    before the function in the prompt; else the text of the answer continues the prompt.
    """
    return [
        [_program(doc["prompt"], doc["entry_point"], answer) for answer in many]
        for many, doc in zip(answers, docs, strict=True)
    ]


def judge(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """The harness's `process_results`: 1 where the first program passes the tests of `doc`."""
    tests = f"{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(f"{results[0][0]}\n{tests}"))}


def passes(program: str) -> bool:
    """Whether `program` comes to its end without an error in time."""
    with tempfile.TemporaryDirectory(prefix="oscar-zoo-code-") as folder:
        path = Path(folder) / "answer.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        child = children.start(
            children.python("-c", _RUNNER, str(path), isolated=True),
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return bool(child.wait(SECONDS) == _PASSED)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also what it has started
            child.wait()


def _program(prompt: str, function: str, answer: str) -> str:
    head = f"def {function}("
    whole = [block for block in _BLOCK.findall(answer) if head in block]
    if whole:
        return f"{prompt.partition(head)[0]}\n{whole[-1]}"
    block = _BLOCK.findall(answer)
    return prompt + (block[-1] if block else answer)
