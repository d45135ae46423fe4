"""The block that `serve` prints when a server is ready, with a program in place of SGLang."""

from __future__ import annotations

from pathlib import Path

import fake_sglang
import pytest
from engines import MODEL
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ((), "on cpu"),
        (("--", "--tp=2"), "on cpu, 2 ranks that share the model"),
        (("--", "--tp=2", "--pp=2"), "on cpu, 4 ranks"),
    ],
)
def test_ranks_on_a_cpu_are_no_gpus(
    flags: tuple[str, ...],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = fake_sglang.take_its_place(monkeypatch, dies=True)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1|2|3")
    folder = write_folder(tmp_path / "artifact", artifact_files())
    words = ["serve", str(folder), "--model", str(MODEL), "--port", str(port), "--device", "cpu"]
    assert run([*words, *flags]) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("Model")]
    assert line.endswith(f"m, SGLang 0 {where}")
