"""Flags that the installed SGLang does not know, refused before it is imported.

SGLang's parser exists only once torch is loaded, which takes ten seconds. Its flags are therefore
read from its source text: the fields of its classes of arguments, and every string that looks like
a flag. That is more than the parser takes, never less, so no flag that SGLang accepts is refused.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oscar_zoo.engines.sglang.launch.denied_flags import is_denied
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.setting_flags import OPTIONS
from oscar_zoo.errors import FlagRefused, UsageError

FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*")
HELP = "--help"
FEWEST = 300
"""Every tested release has more flags. Where fewer are found, the source is not as expected, and
SGLang alone decides."""
CLOSE = 0.75
"""How similar a flag must be to be suggested, as `difflib` measures it."""


def check_known(flags: UserFlags) -> None:
    """Refuse a flag that SGLang's parser would not take, abbreviations included.

    Nothing is refused where SGLang is not installed, or where its source cannot be read.

    Raises:
        UsageError: the flag, and the nearest one that there is.
    """
    known: Set[str] = frozenset()
    for flag in flags.given:
        if not FLAG.fullmatch(flag.name):
            continue  # a value, such as a sentence that begins with hyphens
        known = known or installed_flags()
        if len(known) < FEWEST:
            return
        if not is_taken(flag.name, known):
            raise _unknown(flag.name, known)


def is_taken(flag: str, known: Set[str]) -> bool:
    """Whether a parser that has the flags `known` may take `flag`: as it stands, as the beginning
    of another, or as the `--no-` of a switch."""
    opposite = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag
    return flag == HELP or any(one.startswith((flag, opposite)) for one in known)


def installed_flags() -> Set[str]:
    """The flags of the installed SGLang and of this plugin, and more, with hyphens; none where
    SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    places = () if spec is None else spec.submodule_search_locations or ()
    found = next((flags for place in places if (flags := flags_in(Path(place)))), frozenset())
    ours = {name for option in OPTIONS.values() for name in option.names}
    return found | ours if found else found


def flags_in(package: Path) -> Set[str]:
    """The flags that the source of the `sglang` in `package` names; none where it cannot be read.

    It is read as text and not imported.
    """
    arguments = package / "srt" / "server_args.py"
    groups = sorted((package / "srt" / "arg_groups").rglob("*.py"))
    try:
        trees = [ast.parse(path.read_bytes()) for path in (arguments, *groups)]
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(name.replace("_", "-") for tree in trees for name in _names(tree))


def _names(tree: ast.Module) -> Iterator[str]:
    """Every flag that one file of SGLang may add to a parser."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if FLAG.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield "--" + line.target.id


def _unknown(flag: str, known: Set[str]) -> UsageError:
    allowed = sorted(one for one in known if not is_denied(one))
    close = difflib.get_close_matches(flag, allowed, n=1, cutoff=CLOSE)
    try:
        release = f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        release = "the installed SGLang"
    return FlagRefused(
        f"{release} has no flag {flag}.",
        hint=(
            f"did you mean {close[0]}?"
            if close
            else "see its flags: python -m sglang.launch_server --help"
        ),
    )
