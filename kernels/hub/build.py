"""Lay out oscar_kernels as a universal kernel of the Hugging Face `kernels` hub.

    python kernels/hub/build.py [FOLDER]        build/kernels-hub by default

The hub's loader runs `build/torch-universal/__init__.py` under a name of its own, so every import
inside the package becomes relative. The name holds the digest of the files: two versions can be
loaded side by side.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "oscar_kernels"
NAME = "oscar-kernels"
VARIANT = "torch-universal"
VERSION = 0
"""Of the interface, as the hub counts it; 0 while it may change."""

LICENSE = "apache-2.0"
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
LEFT_OUT = ("bench", "testing.py", "__pycache__")
SUFFIXES = (".py", ".cu", ".cuh", ".typed")

IMPORT = re.compile(
    r"^(?P<indent>[ \t]*)from oscar_kernels(?P<rest>\.[\w.]+)? import ", re.MULTILINE
)

ALIAS = '''"""The same names as the folder above, for older loaders that look for the kernel's name."""

import importlib.util
import sys
from pathlib import Path

_NAME = "{identifier}"
if _NAME not in sys.modules:
    _init = Path(__file__).parent.parent / "__init__.py"
    _spec = importlib.util.spec_from_file_location(_NAME, _init)
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])

__all__ = sys.modules[_NAME].__all__


def __getattr__(name):
    return getattr(sys.modules[_NAME], name)
'''  # noqa: E501


def build(target: Path) -> Path:
    """Write the repository of the kernel to `target`, which is emptied first.

    Returns:
        The folder of its one variant.
    """
    files = sources()
    identifier = f"_{NAME.replace('-', '_')}_{_digest_of(files)[:12]}"
    files[f"{NAME.replace('-', '_')}/__init__.py"] = ALIAS.format(identifier=identifier).encode()
    files["metadata.json"] = _json(metadata(files, identifier))
    if target.exists():
        shutil.rmtree(target)
    variant = target / "build" / VARIANT
    for name, content in files.items():
        path = variant / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.copyfile(HERE / "CARD.md", target / "README.md")
    shutil.copyfile(HERE.parent.parent / "LICENSE", target / "LICENSE")
    return variant


def sources() -> dict[str, bytes]:
    """Files of the package by path, with relative imports only."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        inside = path.relative_to(PACKAGE)
        if path.suffix in SUFFIXES and not set(inside.parts) & set(LEFT_OUT):
            content = path.read_bytes()
            found[inside.as_posix()] = (
                relative(content.decode(), inside).encode() if path.suffix == ".py" else content
            )
    return found


def relative(source: str, inside: Path) -> str:
    """`source` of the module at `inside` the package, with imports of the package made relative.

    Raises:
        ValueError: an import of the package is written in a way that has no relative form.
    """
    dots = "." * len(inside.parts)
    made = IMPORT.sub(
        lambda found: f"{found['indent']}from {dots}{(found['rest'] or '')[1:]} import ", source
    )
    for node in ast.walk(ast.parse(made)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.split(".")[0] == PACKAGE.name for name in names):
            raise ValueError(
                f"{inside}: write `from oscar_kernels... import ...`, not {ast.unparse(node)!r}"
            )
    return made


def metadata(files: dict[str, bytes], identifier: str) -> dict[str, object]:
    """What the loader reads: nothing but torch is needed, and Triton, which comes with it."""
    digests = {
        name: base64.b64encode(hashlib.sha256(files[name]).digest()).decode()
        for name in sorted(files)
    }
    return {
        "name": NAME,
        "id": identifier,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda", "archs": list(CAPABILITIES)},
        "digest": {"algorithm": "sha256", "files": digests},
    }


def _digest_of(files: dict[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return whole.hexdigest()


def _json(content: dict[str, object]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Lay out oscar_kernels as a kernel of the Hugging Face kernels hub."
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=HERE.parent.parent / "build" / "kernels-hub"
    )
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
