"""Proto."""
from __future__ import annotations
from dataclasses import replace
from engine_cases import CASES, HOST, SINKS
import engine_cases
import pytest
from engines import INSTALLED, Engines, needs_sglang
from engine_cases import answers
FEW, NEW, PAGE = 12, 4, 16
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

DISK = {**HOST, "hicache_storage_prefetch_policy": "wait_complete",
  "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}'}

def test_proto(tmp_path):
    runs = Engines(tmp_path, INSTALLED)
    env = {**SINKS, "OSCAR_INT2_DISK_CACHE": str(tmp_path/"disk")}
    case = replace(CASES["host"], engine=DISK, env=env)
    groups = engine_cases.visits(FEW, new=NEW)
    engine_cases.start(runs, ["visits_stock"], groups)
    engine_cases.start(runs, ["a", "b"], groups, case_of={"a": case, "b": case})
    a, b, s = (runs.result(n) for n in ("a", "b", "visits_stock"))
    print({n: g for n, g in answers(a, "cached").items()})
    print({n: g for n, g in answers(b, "cached").items()})
    print([r.get("disk") for r in a["reports"]], [r.get("disk") for r in b["reports"]])
    print(answers(a)==answers(s), answers(b)==answers(s))
    print(runs.log("b")[-3000:])
    import subprocess; print(subprocess.run(f"ls {tmp_path}/disk/* | tail -5; du -sh {tmp_path}/disk", shell=True, capture_output=True, text=True).stdout)
    runs.close()
