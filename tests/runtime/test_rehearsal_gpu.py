"""On a GPU a worker finds every kernel that it needs, when another process has compiled for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.parametrize(
    ("dim", "drafts", "shape"),
    [(128, 1, "chain"), (64, 1, "chain"), (256, 1, "chain"), (128, 8, "tree"), (128, 4, "chain")],
)
def test_workers_compile_nothing(dim: int, drafts: int, shape: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "PYTHONPATH": str(SUPPORT),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "OSCAR_KERNELS_CACHE": str(tmp_path / "cubins"),
    }

    def code_after(what: str) -> set[Path]:
        words = [sys.executable, str(SUPPORT / "rehearsed_child.py"), what]
        command = [*words, str(dim), str(drafts), shape]
        ran = subprocess.run(command, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-3000:]
        made = [x for name in ("triton", "cubins") for x in (tmp_path / name).rglob("*")]
        return {x for x in made if x.suffix in (".cubin", ".so")}

    ahead = code_after("ahead")
    assert len([x for x in ahead if x.suffix == ".cubin"]) > 5
    late = code_after("serve") - ahead
    # Triton's own library is not ours to compile.
    assert {x.name for x in late if not x.name.startswith("cuda_utils")} == set()
