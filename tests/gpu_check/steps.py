"""The steps of the GPU check: ordinary command lines of the tool, and limits on what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
from served import Server, passkey_prompt

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/models/tiny-qwen3-hard"
NAME = "tiny-qwen3-hard"
HUB = "file:./zoo"
COMMAND_SECONDS = 900
"""After this long a command hangs; the longest, with kernels to compile, takes six minutes on an
H100."""
PERPLEXITY_RISE = 0.02
"""Largest relative rise of perplexity of the computed artifact; the quality gate of `compute`."""
RECALL_LOSS = 0.05
"""Largest share of recalled digits that may be lost: 64 questions resolve no less."""


class CheckFailed(Exception):
    """A command failed, or a figure is outside its limit; the message says which."""


class NotTried(Exception):
    """This machine cannot run the step; the message says why."""


@dataclass(frozen=True)
class Check:
    """One run of the check: `work` has all state and is the current folder of every command,
    `device` is `cuda`, or `cpu` for a rehearsal, `engine_flags` are what SGLang needs on this
    machine, `gpu` is the one that commands see, `None` for all, `real_model` is the folder of a
    trained model, `None` to fetch one, and `python` runs commands: for vLLM another one (`vllm`),
    because the engines want other releases of torch."""

    work: Path
    device: str
    engine_flags: tuple[str, ...]
    gpu: str | None = None
    real_model: Path | None = None
    python: str = sys.executable
    vllm: str | None = None

    @property
    def with_vllm(self) -> Check:
        if self.vllm is None or self.device != "cuda":
            raise NotTried(
                "no Python that has vLLM on a GPU was named: make gpu-check VLLM_PYTHON="
            )
        return replace(self, python=self.vllm)

    def zoo(self, *arguments: str) -> dict[str, Any]:
        """Run one command line of the tool with `--json`; its object. Raises `CheckFailed` with its
        error line."""
        done = subprocess.run(
            [self.python, "-m", "oscar_zoo", *_with_json(arguments)],
            cwd=self.work,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode:
            raise CheckFailed(
                f"`oscar-zoo {arguments[0]}` ended with {done.returncode}: {_cause(done)}"
            )
        return dict(json.loads(done.stdout))

    def environment(self) -> dict[str, str]:
        """The variables of every command: all state in `work`, no network."""
        own = {
            f"OSCAR_ZOO_{name}": str(self.work / name.lower())
            for name in ("CACHE", "DATA", "STATE", "CONFIG")
        }
        offline = {"OSCAR_ZOO_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
        return {**self.visible(), **own, **offline, "TOKENIZERS_PARALLELISM": "false"}

    def visible(self) -> dict[str, str]:
        """The variables of this process, with one GPU if it is named."""
        gpu = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        return {**os.environ, **gpu}

    @property
    def engine(self) -> tuple[str, ...]:
        """`-- FLAGS` for a command that starts SGLang, or nothing."""
        return ("--", *self.engine_flags) if self.engine_flags else ()


def compute(check: Check) -> str:
    """`compute` with its defaults on the example model: every method, the best kept."""
    facts = check.zoo("compute", str(EXAMPLE))
    tag = str(facts["id"]).rpartition("/")[2]
    (check.work / "computed").symlink_to(check.work / facts["path"])  # the path may be relative
    seconds = sum(facts["seconds"].values())
    return f"`{tag}` chosen in {seconds:.0f} s"


def publish_and_pull(check: Check) -> str:
    """`verify`, `publish` to a new folder hub, `pull` from it by name, `pull` again."""
    verified = check.zoo("verify", "./computed")
    check.zoo("publish", "./computed", "--hub", HUB, "--create")
    for _ in range(2):
        check.zoo("pull", NAME, "--hub", HUB, "--no-lock")
    return f"verified to level {_level(verified)}, pulled by name twice"


def _level(verified: dict[str, Any]) -> str:
    level = re.search(r'"level": "(\w+)"', json.dumps(verified))
    return level[1] if level else "unknown"


def evaluate(check: Check) -> str:
    """`eval` by name, in process: perplexity and recall within the gates."""
    facts = check.zoo("eval", NAME, "--model", str(EXAMPLE))
    rows = {row["cache"]: row for row in facts["rows"]}
    exact, ours = rows["bf16"], rows["artifact"]
    rise = ours["perplexity"] / exact["perplexity"] - 1
    lost = exact["recall"] - ours["recall"]
    figures = (
        f"perplexity {exact['perplexity']:.3f} -> {ours['perplexity']:.3f} ({100 * rise:+.2f} %), "
        f"recall {exact['recall']:.1%} -> {ours['recall']:.1%}"
    )
    if rise > PERPLEXITY_RISE or lost > RECALL_LOSS:
        raise CheckFailed(
            f"{figures}: outside the limits of {PERPLEXITY_RISE:.0%} and {RECALL_LOSS:.0%}"
        )
    return figures


def serve(check: Check) -> str:
    """`serve` by name: an answer from INT2, a second turn on the first, metrics, `eval --url`,
    SIGTERM."""
    prompt, key = passkey_prompt(ROOT)
    flags = ("--enable-cache-report", "--enable-metrics", *check.engine_flags)
    with Server(check, NAME, "--model", str(EXAMPLE), engine_flags=flags) as server:
        first = server.complete(prompt, tokens=8)
        again = server.complete(
            prompt + first.text + "\nQuestion: What is the access code of Bemika?\nAnswer: ", 8
        )
        metrics = server.get("/metrics")
        if key not in first.text:
            raise CheckFailed(f"the server was asked for {key} and answered {first.text!r}")
        if again.cached < MINIMUM_REUSE:
            raise CheckFailed(
                f"the second turn reused {again.cached} of {again.prompt} prompt tokens"
            )
        running = {one["url"]: one["canary"] for one in check.zoo("ps")["servers"]}
        canary = running[f"{server.url}/v1"]
        if "oscar_int2_capacity_tokens" not in metrics or canary != "in band":
            raise CheckFailed(f"/metrics lacks ours, or the canary is no good: {canary}")
        facts = check.zoo("eval", NAME, "--model", str(EXAMPLE), *SERVER_EVAL, "--url", server.url)
    return (
        f"ready after {server.ready['seconds']:.0f} s, {server.ready['capacity_tokens']:,} tokens"
        f" fit; right answer to {first.prompt} prompt tokens; second turn reused {again.cached} of"
        f" {again.prompt}; {server_figures(facts)}; exit code {server.code} after SIGTERM"
    )


def serve_with_host(check: Check) -> str:
    """`serve --host-cache` by name: a prompt that left the GPU comes back, and has its answer."""
    prompt, key = passkey_prompt(ROOT)
    few = ("--max-total-tokens=4096", "--enable-cache-report", "--enable-metrics")
    line = (NAME, "--model", str(EXAMPLE), "--host-cache", "2GiB")
    with Server(check, *line, engine_flags=(*few, *check.engine_flags)) as server:
        first = server.complete(prompt, 8)
        for other in range(3):
            server.complete(f"{other} {prompt}", 1)
        again = server.complete(prompt, 8)
        back = re.search(r"^sglang:load_back_tokens_total\S* (\S+)", server.get("/metrics"), re.M)
    if key not in first.text or again.text != first.text or again.cached < MINIMUM_REUSE:
        raise CheckFailed(
            f"{key}: {first.text!r}; {again.cached} tokens were there the second time,"
            f" and the answer {again.text!r}"
        )
    if back is None or float(back[1]) < MINIMUM_REUSE:
        raise CheckFailed(f"{again.cached} tokens were still on the device")
    return f"the same answer twice; {float(back[1]):.0f} of {again.prompt} tokens came back"


SIZES = ("--windows", "3", "--answers", "12")
SERVER_EVAL = ("--engine", "sglang", *SIZES)
MINIMUM_REUSE = 320
"""Tokens of a second turn that come from the prefix cache: more than the sink and recent windows
hold."""


def server_figures(facts: dict[str, Any]) -> str:
    """Perplexity and recall of the server that `eval` asked; raises `CheckFailed` outside its
    limits."""
    (row,) = facts["servers"]
    cold, warm, recall = row["perplexity"], row["perplexity_after_hit"], row["recall"]
    figures = (
        f"perplexity of the server {cold['server']:.4f}, of the reference {cold['reference']:.4f}"
    )
    if warm:
        figures += f"; behind a prefix hit {warm['server']:.4f} and {warm['reference']:.4f}"
    if row["violations"]:
        raise CheckFailed(f"{figures}: {'; '.join(row['violations'])}")
    right = [
        f"{recall[name]:.0%} {words}"
        for name, words in RECALLS.items()
        if recall and recall[name] is not None
    ]
    return f"{figures}; recall {', '.join(right)}" if right else figures


RECALLS = {"talking": "over three turns", "alone": "in one", "reference": "of the reference"}


def compute_experts(check: Check) -> str:
    """`pull ./FOLDER --compute` of a random Qwen3-MoE: computed, published to the own zoo, pulled
    from there."""
    check.zoo("pull", f"./{EXPERTS}", "--compute", "--no-lock")
    return "computed, published to the own zoo, pulled"


EXPERTS = "tiny-moe"


def serve_experts(check: Check) -> str:
    """`eval ./FOLDER --engine sglang`, which starts a server of its own."""
    facts = check.zoo(
        "eval", f"./{EXPERTS}", *SERVER_EVAL, "--model", f"./{EXPERTS}", *check.engine
    )
    return server_figures(facts)


def compute_mixed(check: Check) -> str:
    """`compute --bits` of the example model: keys of the most sensitive layers get 4 bits."""
    chosen = ("--method", "wush", "--bits", "2.75", "--output-dir", f"./{MIXED}")
    facts = check.zoo("compute", str(EXAMPLE), *chosen)
    tag = str(facts["id"]).rpartition("/")[2]
    if "_bits" not in tag:
        raise CheckFailed(f"`{tag}` has codes of 2 bits everywhere: no layer was raised")
    return f"`{tag}` in {sum(facts['seconds'].values()):.0f} s"


MIXED = "mixed-widths"


def serve_mixed(check: Check) -> str:
    """`eval ./FOLDER --engine sglang` of the artifact whose layers have different widths."""
    command = ("eval", f"./{MIXED}", *SERVER_EVAL, "--model", str(EXAMPLE))
    return server_figures(check.zoo(*command, *check.engine))


def compute_real(check: Check) -> str:
    """`compute` with its defaults on a trained model, which is fetched where none is given."""
    if check.device != "cuda":
        raise NotTried("this takes a quarter of an hour on a CPU")
    if check.real_model is None:
        command = [sys.executable, ROOT / "contrib/models/smollm2.py", check.work / REAL]
        done = subprocess.run(command, env=check.visible(), capture_output=True, text=True)
        if done.returncode:
            raise NotTried(f"{_cause(done)}; or give a folder: make gpu-check REAL_MODEL=DIR")
    else:
        (check.work / REAL).unlink(missing_ok=True)  # of a run that was stopped
        (check.work / REAL).symlink_to(check.real_model.absolute())
    facts = check.zoo("compute", f"./{REAL}", "--output-dir", f"./{REAL}-rotation")
    tag = str(facts["id"]).rpartition("/")[2]
    return f"`{tag}` chosen in {sum(facts['seconds'].values()):.0f} s"


REAL = "real"


def serve_real(check: Check) -> str:
    """`eval ./FOLDER --engine sglang` of the trained model."""
    _need_real(check)
    return server_figures(check.zoo(*_eval(REAL), *check.engine))


def _need_real(check: Check) -> None:
    if not (check.work / f"{REAL}-rotation").exists():
        raise NotTried("there is no rotation of the trained model")


def serve_ngrams(check: Check) -> str:
    """`eval NAME --engine sglang` of the example model, with drafts from a table of n-grams."""
    command = ("eval", NAME, *SERVER_EVAL, "--model", str(EXAMPLE))
    return _with_drafts(check, command, "NGRAM", "--speculative-num-draft-tokens=8")


def serve_own_drafts(check: Check) -> str:
    """`compute ./FOLDER` of a random GLM-4.5, and `eval --engine sglang` with drafts from the layer
    for later tokens that its checkpoint has."""
    compute_random(check, DRAFTING)
    return _with_drafts(check, _eval(DRAFTING), "NEXTN", *OWN_DRAFTS)


DRAFTING = "tiny-mtp"
OWN_DRAFTS = (
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
    "--speculative-draft-attention-backend=triton",
)


def serve_hybrid_drafts(check: Check) -> str:
    """`eval ./FOLDER --engine sglang` of the hybrid, with drafts from a layer of its own."""
    return _with_drafts(check, _eval(HYBRID), "NEXTN", *OWN_DRAFTS)


def _with_drafts(check: Check, command: tuple[str, ...], algorithm: str, *flags: str) -> str:
    if check.device != "cuda":
        raise NotTried("SGLang verifies drafts on a GPU only")
    drafts = (f"--speculative-algorithm={algorithm}", *flags)
    return server_figures(check.zoo(*command, "--", *check.engine_flags, *drafts))


def write_models(check: Check) -> None:
    """Write the random models, in one thread: two cannot import transformers at once."""
    from tiny_moe import write_model
    from window_drafts import EVERY_EXPERT, WINDOWED

    sys.path.insert(0, str(ROOT / "tests/support"))
    from architectures import ARCHITECTURES, write_architecture, write_mtp_model
    from tiny_models import change_config

    write_model(check.work / EXPERTS, EXAMPLE)
    write_mtp_model("qwen3_5", check.work / HYBRID)
    write_mtp_model("glm4_moe", check.work / DRAFTING)
    change_config(write_architecture("gpt_oss", check.work / WINDOWED), **EVERY_EXPERT)
    small = ARCHITECTURES["deepseek_v3"]
    ARCHITECTURES[LATENT] = replace(small, values={**small.values, **OF_DEEPSEEK})
    change_config(write_architecture(LATENT, check.work / LATENT), **SAID_BY_DEEPSEEK)


HYBRID = "tiny-hybrid"
"""A random Qwen3.5, half of whose layers are linear attention."""


def compute_random(check: Check, name: str) -> str:
    """`compute ./FOLDER` of a model with random weights, to `FOLDER-rotation`."""
    output = ("--output-dir", f"./{name}-rotation")
    facts = check.zoo("compute", f"./{name}", "--method", "oscar", "--allow-poor", *output)
    return f"computed in {sum(facts['seconds'].values()):.0f} s"


def _eval(name: str) -> tuple[str, ...]:
    return ("eval", f"./{name}-rotation", *SERVER_EVAL, "--model", f"./{name}")


def serve_hybrid(check: Check) -> str:
    """`eval ./FOLDER --engine sglang` of the hybrid; its linear attention needs a GPU."""
    if check.device != "cuda":
        raise NotTried("SGLang runs this model on a GPU only")
    return server_figures(check.zoo(*_eval(HYBRID), *check.engine))


LATENT = "tiny-mla"
OF_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 4}
"""A random DeepSeek-V3 with rows of its width, dense, as bfloat16 chooses other random experts."""
SAID_BY_DEEPSEEK = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What SGLang reads in its files, and transformers does not write."""


def serve_latents(check: Check) -> str:
    """`compute ./FOLDER` of a model that caches latents (MLA), and `eval --engine sglang`."""
    if check.device != "cuda":
        raise NotTried("latents are served on a GPU only")
    few = ("--method", "wush", "--calib-tokens", "4096", "--seq-len", "1024", "--allow-poor")
    check.zoo("compute", f"./{LATENT}", *few, "--output-dir", f"./{LATENT}-rotation")
    return server_figures(check.zoo(*EVAL_LATENTS, *check.engine))


EVAL_LATENTS = (
    *("eval", f"./{LATENT}-rotation", "--model", f"./{LATENT}"),
    *("--engine", "sglang", "--task", "perplexity", "--windows", "4"),
)


def serve_latents_on_two(check: Check) -> str:
    """The same on two GPUs, which share the heads and each keep all rows."""
    if len(machine.visible()) < 2:
        raise NotTried("this machine has one GPU")
    both = replace(check, gpu=None)
    return server_figures(both.zoo(*EVAL_LATENTS, "--tp", "2", *both.engine))


def bench_serve(check: Check) -> str:
    """`bench serve`, one short case with random weights: of Qwen3-8B's shape on a GPU."""
    gpu = check.device == "cuda"
    few_graphs = ("--", "--cuda-graph-max-bs=2", *check.engine_flags) if gpu else check.engine
    model, context = ("Qwen3-8B", "8000") if gpu else (str(EXAMPLE), "600")
    shape = (model, "--batch", "1", "--context", context)
    sizes = ("--new-tokens", "48", "--repeats", "1", "--csv", "bench-serve.csv")
    facts = check.zoo("bench", "serve", "--dummy-weights", *shape, *sizes, *few_graphs)
    sides = {side["cache"]: side["cases"][0] for side in facts["sides"]}
    steps = ", ".join(f"{x.upper()} {case['ms_per_token']:.2f} ms" for x, case in sides.items())
    ready = ", ".join(f"{side['cache'].upper()} {side['start_s']:.0f} s" for side in facts["sides"])
    ratios = {name: facts["capacity_ratio"][f"int2_over_{name}"] for name in ("bf16", "fp8")}
    room = " and ".join(f"{r:.2f}x the tokens of {name.upper()}" for name, r in ratios.items() if r)
    room = room or "tokens not compared"
    return f"a decode step at {context} tokens: {steps}; {room}; ready after {ready}"


def precompile(check: Check) -> None:
    """Compile what `bench serve` needs of FlashInfer; without it that step takes longer."""
    if check.device == "cuda":
        command = [sys.executable, Path(__file__).with_name("precompile.py")]
        subprocess.run(command, cwd=check.work, env=check.visible(), capture_output=True)


def kernel_tests(check: Check) -> str:
    """The tests of kernels and compute that need a GPU, less those that compile a baseline."""
    if check.device == "cpu":
        raise NotTried("these tests need a GPU")
    return run_tests(check, "-m", "gpu", *PARALLEL, *TESTS)


def in_transformers(check: Check) -> str:
    """`OscarCache` in `model.generate`: tokens against the reference, and bytes."""
    if check.device == "cuda":
        return run_tests(check, "-k", "cuda", "-n", "4", "tests/engines/transformers")
    return run_tests(check, "-k", "on-cpu", "tests/engines/transformers/test_devices.py")


def in_vllm(check: Check) -> str:
    """Tokens of stock vLLM against the reference, and a server of it behind our front: a second
    turn, and `eval --url`."""
    own = check.with_vllm
    tests = run_tests(own, "-k", "cuda", "-n", "3", "tests/engines/vllm/test_tokens.py")
    prompt, key = passkey_prompt(ROOT)
    line = (NAME, "--model", str(EXAMPLE), "--engine", "vllm")
    with Server(own, *line, engine_flags=OF_VLLM) as server:
        first = server.complete(prompt, tokens=8)
        again = server.complete(prompt + first.text + "\nQuestion: What is it?\nAnswer: ", 8)
        if key not in first.text or again.cached < MINIMUM_REUSE:
            raise CheckFailed(f"asked for {key}: {first.text!r}; then {again.cached} were reused")
        facts = own.zoo("eval", *line, *SIZES, "--url", server.url)
    return (
        f"{tests}; server ready after {server.ready['seconds']:.0f} s; second turn reused"
        f" {again.cached} of {again.prompt}; {server_figures(facts)}"
    )


def in_vllm_on_two(check: Check) -> str:
    """Tokens of stock vLLM whose ranks share the heads on two GPUs, against the reference."""
    own = check.with_vllm
    if len(machine.visible()) < 2:
        raise NotTried("this machine has one GPU")
    return run_tests(replace(own, gpu=None), "-k", "2-cuda", "tests/engines/vllm/test_tokens.py")


def real_in_vllm(check: Check) -> str:
    """`eval --engine vllm --url` of the trained model."""
    own = check.with_vllm
    _need_real(check)
    line = (f"./{REAL}-rotation", "--model", f"./{REAL}", "--engine", "vllm")
    with Server(own, *line, engine_flags=OF_VLLM) as server:
        return server_figures(own.zoo("eval", *line, *SIZES, "--url", server.url))


OF_VLLM = ("--gpu-memory-utilization=0.1", "--kv-cache-memory-bytes=2000000000")


def run_tests(check: Check, *chosen: str, **environment: str) -> str:
    """Run tests in this checkout; the summary of pytest."""
    # -P: in this checkout oscar_zoo lacks the packages that an installation has from other folders
    command = [check.python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    env = check.visible() | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    summary = (done.stdout.strip() or "no output").splitlines()[-1]
    if done.returncode != 0 or "passed" not in summary:
        (log := check.work / f"tests-{hash(chosen):x}.log").write_text(done.stdout + done.stderr)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise CheckFailed(f"{summary.strip('= ')}: {'; '.join(failed[:8])} ({log})")
    return summary.strip("= ")


TESTS = (
    "tests/kernels",
    "tests/runtime/test_reference_executor.py",
    "tests/runtime/test_flashinfer_prefill.py",
    "tests/runtime/test_executor_gpu.py",
    "tests/runtime/test_verify_gpu.py",
    "tests/runtime/test_rehearsal_gpu.py",
    "tests/compute/test_products.py",
    "tests/compute/test_capture_transformers.py",
)
PARALLEL = ("-n", str(max(2, min(16, (os.cpu_count() or 1) // 2))))


def _with_json(arguments: tuple[str, ...]) -> list[str]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], "--json", *arguments[at:]]


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    try:
        error = json.loads(done.stdout)["error"]
        return f"{error['message']} {error['hint'] or ''}".strip()
    except (ValueError, KeyError, TypeError):
        return (done.stderr or done.stdout).strip()[-400:]
