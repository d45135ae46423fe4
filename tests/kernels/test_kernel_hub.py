"""The folder for the Hugging Face kernels hub, loaded as its library does: from a path, under
another name."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from oscar_kernels import testing
from oscar_kernels.decode_attention import dispatch
from oscar_kernels.spec import QuantSpec

BUILDER = Path(__file__).resolve().parents[2] / "kernels" / "hub" / "build.py"

IMPORT_EVERYTHING = """
import importlib, importlib.util, pathlib, pkgutil, sys
sys.modules["oscar_kernels"] = None
spec = importlib.util.spec_from_file_location("elsewhere", pathlib.Path(sys.argv[1], "__init__.py"))
module = sys.modules["elsewhere"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for found in pkgutil.walk_packages(module.__path__, "elsewhere."):
    if found.name != "elsewhere.oscar_kernels":
        importlib.import_module(found.name)
assert len(module.decode_attention.cuda.launcher.SOURCE.files()) > 1
assert not any(name.startswith("oscar_kernels.") for name in sys.modules)
"""


def load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return load_file(BUILDER, "kernel_hub_builder")


@pytest.fixture(scope="module")
def variant(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builder.build(tmp_path_factory.mktemp("hub") / "kernels-hub")


def loaded(variant: Path) -> ModuleType:
    """By the library where it is installed, else by its rule: `__init__.py` run under the id of the
    metadata."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")  # the folder of this checkout has its name
        from kernels import get_local_kernel

        return get_local_kernel(variant.parents[1])
    return load_file(
        variant / "__init__.py", json.loads((variant / "metadata.json").read_text())["id"]
    )


def test_metadata_names_every_file_and_nothing_that_must_be_installed(variant: Path) -> None:
    metadata = json.loads((variant / "metadata.json").read_text())
    assert (
        metadata["id"].isidentifier()
        and metadata["name"] == "oscar-kernels"
        and metadata["python-depends"] == []
    )
    files = {
        p.relative_to(variant).as_posix(): p.read_bytes() for p in variant.rglob("*") if p.is_file()
    }
    del files["metadata.json"]
    want = {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in files.items()
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": want}
    assert {
        "decode_attention/cuda/decode.cu",
        "kv_write/kernel.py",
        "oscar_kernels/__init__.py",
    } <= set(files)
    assert not any(name.startswith(("bench", "testing")) for name in files)


def test_imports_are_relative_torch_triton_or_the_standard_library(variant: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_every_module_is_importable_where_oscar_kernels_is_not(variant: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, str(variant)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_the_loaded_kernel_decodes_as_ours(variant: Path) -> None:
    pytest.importorskip("triton")
    kernel = loaded(variant)
    assert kernel.__name__ != "oscar_kernels" and set(kernel.__all__) == set(
        load_file_names(variant)
    )
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    filling = testing.random_cache(
        [70, 1], QuantSpec(64, 64, 0.96), sink=5, recent=9, dtype=dtype, device=device
    )
    query = torch.randn(2, 8, 64, dtype=dtype, device=device)
    want = dispatch.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1)
    got = kernel.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1)
    assert torch.equal(got, want)


def load_file_names(variant: Path) -> list[str]:
    """Public names by the folder that older loaders look for."""
    names: list[str] = load_file(variant / "oscar_kernels" / "__init__.py", "older_loader").__all__
    return names


@pytest.mark.parametrize("line", ["import oscar_kernels.spec", "from oscar_kernels import(spec)"])
def test_an_import_without_a_relative_form_is_refused(builder: ModuleType, line: str) -> None:
    with pytest.raises(ValueError, match=r"spec\.py: write"):
        builder.relative(line + "\n", Path("spec.py"))


def test_a_rebuild_gives_the_same_bytes(builder: ModuleType, variant: Path, tmp_path: Path) -> None:
    again = builder.build(tmp_path / "again")
    assert (again / "metadata.json").read_bytes() == (variant / "metadata.json").read_bytes()
