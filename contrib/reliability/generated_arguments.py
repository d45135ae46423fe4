"""Arguments that try to smuggle a flag through `serve`, and what SGLang's own parser makes of them.

Runs in a fork of `sglang_forks`; nothing is started.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked_python import fork_programs
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.user_flags import DENIED_FAMILIES, DENIED_FLAGS

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
DENIED = (*DENIED_FLAGS, *(f"{family}x" for family in DENIED_FAMILIES))
ALLOWED = ("--tp=1", "--context-length=256", "--enable-metrics", "--log-level=info", "--dtype")
PARTS = (
    "0.0.0.0",
    "::",
    "\n",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "\u2010\u2010host",
    "\uff0d\uff0dhost=0.0.0.0",
    " --host 0.0.0.0",
    "; touch x",
    "$(touch x)",
    "'",
    '"',
    "=",
    "-",
    "--",
    "@file",
    "ä",
    "",
)
OPTIONS = ("--model", "--revision", "--clip", "--port", "--device", "--hub", "--served-model-name")
OURS = {"model_path", "port", "base_gpu_id", "device"}
"""What options of `serve` decide."""
REFUSED = {0: "made", 1: "refused", 2: "refused", 3: "refused", 4: "refused", 5: "refused"}


def check(count: int, seed: int, work: str, out: str) -> None:
    """Try `count` command lines; what came of them, as JSON in the file `out`."""
    trial = _Trial(Path(work))
    fork_programs()  # the parser that a command asks in a process of its own is imported here
    outcomes: dict[str, int] = {"made": 0, "refused": 0}
    violations: list[str] = []
    for number in range(count):
        chance = random.Random(seed + number)
        behind = _behind(chance)
        words = [*_words(chance, trial.artifact), *behind]
        code, said, err = _run(words)
        if code not in REFUSED or "Traceback" in err or "internal error" in err:
            violations.append(f"{words}: ended with {code}: {err.strip()[-200:]}")
            continue
        outcomes[REFUSED[code]] += 1
        if code == 0:
            violations += [f"{words}: {line}" for line in trial.wrong(behind[1:], json.loads(said))]
    Path(out).write_text(json.dumps({"outcomes": outcomes, "violations": violations}))


class _Trial:
    """What an innocent command line gives, to compare with."""

    def __init__(self, work: Path) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.server_args import ServerArgs

        self.parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(self.parser)
        self.artifact = str(write_folder(work / "an artifact", artifact_files()))
        self.names = {name for action in self.parser._actions for name in action.option_strings}
        code, said, err = _run(["serve", self.artifact, "--print", "--json", "--model", str(MODEL)])
        assert code == 0, err
        facts = json.loads(said)
        self.flags = {_flag(word) for word in facts["argv"][4:]}
        self.parsed = vars(self.parser.parse_args(facts["argv"][4:]))
        denied = [action for action in self.parser._actions if self._is_denied(action)]
        self.guarded = {action.dest for action in denied} - OURS

    def _is_denied(self, action: argparse.Action) -> bool:
        names = action.option_strings
        return any(
            name in DENIED_FLAGS or name.startswith(tuple(DENIED_FAMILIES)) for name in names
        )

    def wrong(self, behind: list[str], facts: dict[str, Any]) -> Iterator[str]:
        """What a command has that it must not have; the user wrote `behind` behind `--`."""
        argv = facts["argv"][4:]
        ours = argv[: len(argv) - len(behind)]
        if argv[len(ours) :] != behind:
            yield f"the flags of the user are {argv[len(ours) :]}"
        more = {_flag(word) for word in ours} - self.flags - {"--revision"}
        if more:
            yield f"has {sorted(more)}"
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                parsed = vars(self.parser.parse_args(argv))
            except SystemExit:
                if "ambiguous" in said.getvalue():
                    yield said.getvalue().strip().splitlines()[-1]
                return  # SGLang would refuse it, too
        was = self.parsed
        changed = {name: parsed[name] for name in self.guarded if parsed.get(name) != was.get(name)}
        if changed:
            yield f"changes {changed}"
        if parsed["host"] != "127.0.0.1":
            yield f"listens on {parsed['host']}"


def _words(chance: random.Random, artifact: str) -> Iterator[str]:
    yield from ("serve", artifact, "--print", "--json")
    if chance.random() < 0.7:
        yield from ("--model", str(MODEL))
    for _ in range(chance.choice((0, 0, 1, 2))):
        option, value = chance.choice(OPTIONS), _text(chance)
        yield from (f"{option}={value}",) if chance.random() < 0.5 else (option, value)


def _behind(chance: random.Random) -> list[str]:
    """`--` and flags for SGLang, or nothing."""
    if chance.random() < 0.3:
        return []
    return ["--", *(_flag_text(chance) for _ in range(chance.choice((1, 1, 2, 3))))]


def _text(chance: random.Random) -> str:
    pieces = (*PARTS, *DENIED, "cpu", "cuda", "main", "0.9,0.9", "30001", str(MODEL))
    return "".join(chance.choice(pieces) for _ in range(chance.choice((1, 1, 2, 3))))


def _flag_text(chance: random.Random) -> str:
    """A flag that is refused, in some spelling, one that is allowed, or anything."""
    how = chance.randrange(8)
    name = chance.choice(DENIED)
    if how == 0:
        return chance.choice(ALLOWED)
    if how == 1:
        return _text(chance)
    if how == 2:
        name = name[: chance.randrange(3, len(name) + 1)]
    if how == 3:
        name = name.replace("-", "_").replace("__", "--", 1)
    if how == 4:
        name = name.upper() if chance.random() < 0.5 else f"{name}{chance.choice(PARTS)}"
    if how == 5:
        name = f"{chance.choice(ALLOWED)}{chance.choice((' ', chr(10), chr(0), '='))}{name}"
    if how == 6:
        name = chance.choice(("-", "---", " ", "\t")) + name.lstrip("-")
    return name if chance.random() < 0.5 else f"{name}={chance.choice(('0.0.0.0', 'x', '1'))}"


def _flag(word: str) -> str:
    return word.partition("=")[0]


def _run(words: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = run(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()
