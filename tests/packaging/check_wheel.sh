#!/usr/bin/env bash
# Install a built wheel into a fresh environment away from the checkout, without torch, and use it.
#   check_wheel.sh WHEEL [PYTHON]
set -euo pipefail
wheel=$(realpath "$1"); python=${2:-python3}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q "$wheel"
cd "$work"
export OSCAR_ZOO_CACHE=$work/cache OSCAR_ZOO_DATA=$work/data OSCAR_ZOO_STATE=$work/state
run() { "$work/venv/bin/oscar-zoo" "$@"; }
"$work/venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is not None and "torch is installed")'
run --version
for command in list info pull verify publish mirror yank cache doctor compute fit plot eval serve; do run "$command" --help > /dev/null; done
run list --json > list.json
run info Qwen3-8B --json > info.json
run site --output site > /dev/null
"$work/venv/bin/python" - <<'PY'
import json
models = {row["model"] for row in json.load(open("list.json"))["artifacts"]}
assert "Qwen3-8B" in models, models
assert json.load(open("info.json"))["recipe"]["hf_id"] == "Qwen/Qwen3-8B"
import oscar_kernels, oscar_zoo.engines.sglang.launch.plan as launch
from importlib.resources import files
assert oscar_kernels.QuantSpec(128, 128).num_groups == 1
for folder, name in (("", "machine.cuh"), ("decode_attention", "decode.cu"), ("kv_write", "quantize.cuh")):
    assert files("oscar_kernels").joinpath(folder, name).is_file(), name
assert (launch.cpu_site_dir() / "sitecustomize.py").is_file()
PY
echo "wheel ok: $(basename "$wheel")"
