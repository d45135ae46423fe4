"""The flags of the installed SGLang, read from its source text without importing it.

SGLang's parser exists only once torch is loaded, which takes ten seconds. Read are the fields of
its classes of arguments, and every string that looks like a flag. That is more than the parser
takes, never less.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator, Set
from functools import lru_cache
from pathlib import Path

from oscar_zoo.engines.sglang.setting_flags import OPTIONS

FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*")
HELP = "--help"
FEWEST = 300
"""Every tested release has more flags. Where fewer are found, the source is not as expected, and
SGLang alone decides."""


def is_taken(flag: str, known: Set[str]) -> bool:
    """Whether a parser that has the flags `known` may take `flag`: as it stands, as the beginning
    of another, or as the `--no-` of a switch."""
    opposite = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag
    return flag == HELP or any(one.startswith((flag, opposite)) for one in known)


def means(flag: str, names: Collection[str]) -> bool:
    """Whether SGLang's parser takes `flag` for one of `names`, which are names of one flag: as it
    stands, or as the beginning of one that no other flag has.

    Where SGLang is not installed, only as it stands.
    """
    if flag in names:
        return True
    if len(flag) < 3 or not any(name.startswith(flag) for name in names):
        return False
    known = installed_flags()
    longer = {one for one in known if one.startswith(flag)}
    return flag not in longer and 0 < len(longer) == len(longer & {*names})


def installed_flags() -> Set[str]:
    """The flags of the installed SGLang and of this plugin, and more, with hyphens; none where
    SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    places = () if spec is None else spec.submodule_search_locations or ()
    found = next((flags for place in places if (flags := flags_in(Path(place)))), frozenset())
    ours = {name for option in OPTIONS.values() for name in option.names}
    return found | ours if found else found


@lru_cache(maxsize=4)
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
