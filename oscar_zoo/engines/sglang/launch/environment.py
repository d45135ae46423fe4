"""The environment of a server: an allow-list of its parent's variables, and those that we set.

It holds no token, so a model that needs one must be on this machine before the server starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oscar_zoo import children

KEPT_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP SHELL TERM VIRTUAL_ENV LD_LIBRARY_PATH CC"
    " CXX HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE XDG_CACHE_HOME"
    " XDG_DATA_HOME HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy SSL_CERT_FILE"
    " SSL_CERT_DIR OSCAR_KERNELS_CACHE OSCAR_KERNELS_CUDA_WRITE".split()
)
KEPT_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "SGLANG_",
    "TORCHINDUCTOR_",
)
DROPPED_VARIABLES = frozenset(
    ["SGLANG_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_MODEL_ARCH"]
)

HARMFUL_VARIABLES = (
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    *sorted(DROPPED_VARIABLES - {"SGLANG_PLUGINS"}),
)
"""Variables that run code or lower a guard. A server never gets them; a printed command removes
them."""

NO_MODULES = "/dev/null/oscar-zoo-runs-no-code-of-a-model"
"""Where transformers would copy the code of a model before it imports it. Nothing can be written
there, because SGLang imports such code for unknown architectures and for processors without asking
`--trust-remote-code`."""

ENDS_AT_ONCE = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
"""SGLang holds every request for 65 seconds after a crash, in which it writes what its developers
read. A server ends at once instead, unless the user sets these."""


def cpu_site_dir() -> Path:
    """Folder of the import shims that only a machine without a GPU needs."""
    return Path(__file__).resolve().parent / "cpu_site"


def child_environment(
    parent: Mapping[str, str], *, device: str | None, kernels: Path
) -> dict[str, str]:
    """The server's whole environment.

    Kept: an allow-list without tokens, preloads or Python paths. Set: weights-only loading, the
    plugin filter, no imports from the current folder, an end without delay after a crash (unless
    `parent` says otherwise), private folders for what Triton and torch compile, and on a CPU the
    import shims and Triton's interpreter (SGLang's slot allocator uses Triton for every attention
    backend it does not know). There torch compiles none of SGLang's small functions either, which
    took longer than they run.

    Args:
        device: `cpu` adds what a machine without a GPU needs.
        kernels: folder only this user may enter, for compiled kernels.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if (name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES))
        and name not in DROPPED_VARIABLES
    }
    wanted = {name: value for name, value in kept.items() if name in ENDS_AT_ONCE}
    return kept | set_variables(device=device, kernels=kernels) | wanted


def set_variables(*, device: str | None, kernels: Path) -> dict[str, str]:
    """The variables that a server gets beside those of its parent; arguments as for
    `child_environment`."""
    env = {
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "SGLANG_PLUGINS": "oscar",
        "HF_MODULES_CACHE": NO_MODULES,
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
        **children.SAFE,
        "PYTHONUNBUFFERED": "1",
        **ENDS_AT_ONCE,
    }
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
        env["TORCHDYNAMO_DISABLE"] = "1"
        env["PYTHONPATH"] = str(cpu_site_dir())
    return env
