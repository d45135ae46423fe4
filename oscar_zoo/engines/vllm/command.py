"""Stock vLLM with the plugin: the command that starts it, made out of that for SGLang, and what a
server says of itself. Needs neither torch nor vllm."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from oscar_zoo import children
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.setting_flags import OPTIONS
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, ServeOptions
from oscar_zoo.engines.sglang.sizing import UNKNOWN
from oscar_zoo.engines.vllm.client import VllmClient
from oscar_zoo.engines.vllm.register import DTYPE
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models.geometry import number
from oscar_zoo.models.other_layers import kept_by_others

NOT_BUILT = "the INT2 cache in vLLM does not have it"
ALLOWED = frozenset(
    "--max-num-seqs --max-model-len --max-num-batched-tokens --gpu-memory-utilization --dtype"
    " --seed --block-size --num-gpu-blocks-override --kv-cache-memory-bytes --quantization"
    " --enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill --max-logprobs"
    " --no-enable-chunked-prefill --async-scheduling --no-async-scheduling --scheduling-policy"
    " --long-prefill-token-threshold --enforce-eager --cudagraph-capture-sizes"
    " --max-cudagraph-capture-size --optimization-level --served-model-name --load-format"
    " --enable-auto-tool-choice --tool-call-parser --reasoning-parser --skip-tokenizer-init"
    " --default-chat-template-kwargs --limit-mm-per-prompt --language-model-only"
    " --disable-log-stats --uvicorn-log-level --disable-uvicorn-access-log"
    " --enable-prompt-tokens-details --enable-server-load-tracking --tensor-parallel-size"
    " --speculative-config --prefix-match-unit".split()
)
"""Flags of vLLM that go behind `--`. Others import code by name, unpickle what a request holds,
open a second way in, or have not been looked at."""
INSTEAD = dict.fromkeys(
    "--pipeline-parallel-size -pp -dp --data-parallel-size --enable-lora"
    " --kv-transfer-config".split(),
    NOT_BUILT,
) | {
    "--host": "use --expose and --require-key in front of --",
    "--api-key": "use --require-key in front of --",
    "--port": "put it in front of --",
    "--revision": "put it in front of --",
    "--kv-cache-dtype": "serve sets it",
    "--distributed-executor-backend": "serve sets it",
    "--enable-metrics": "vLLM has /metrics without it",
    "--context-length": "vLLM calls it --max-model-len",
    "--mem-fraction-static": "vLLM calls it --gpu-memory-utilization",
    "--max-running-requests": "vLLM calls it --max-num-seqs",
}
"""Why not, or what to do, where people ask."""
FORMATS = ("safetensors", "dummy")
"""Of weights: those of files, or random ones."""
DRAFTS = "--speculative-config"
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4}
METHODS = {"ngram": {"prompt_lookup_min", "prompt_lookup_max"}, "eagle3": {"model", "revision"}}
"""The drafts that the cache has, and what may be said of them beside their number."""
REQUESTS = "--max-num-seqs"
"""Of its own vLLM prepares for up to 1,024 requests at a time, each of which has windows here."""
FORMAT = "--load-format"
PARALLEL = "--tensor-parallel-size"
PROGRAM = ("-m", "vllm.entrypoints.cli.main")
OFFLINE = ("-m", "oscar_zoo.engines.vllm.offline")
FRONT = OPTIONS["front"]
OURS = (
    "--middleware=oscar_zoo.engines.vllm.front.InFront",
    "--worker-extension-cls=oscar_zoo.engines.vllm.metrics.Extension",
)
"""What stands in front of vLLM, and what tells of its worker."""
WARNING = "vLLM started from a shell has no front: it asks for no key, and every route is open."
VARIABLES = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_PLUGINS": "oscar",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What the plugin needs; and vLLM tells nobody that it runs."""
OF_SGLANG = ("SGLANG_", "PYTHONPATH")
LIMITS = {"--num-gpu-blocks-override", "--kv-cache-memory-bytes"}
"""Flags by which memory does not say how many tokens fit."""


@dataclass(frozen=True)
class CommandOfVllm:
    options: ServeOptions
    words: tuple[str, ...]  # flags of the user
    requests: int  # at a time
    mixed: bool  # other layers, whose pages vLLM counts too

    @classmethod
    def asked(cls, params: Any, prepared: Any) -> Self | None:
        """The command, if this engine is asked for by `ServeParams` of `serving`. Refuses what
        vLLM, or our cache in it, does not do with what is `Prepared`."""
        if params.engine != "vllm":
            return None
        words, chosen = spelled(params.flags), ServeOptions(**prepared.options(params))
        given = check_words(words)
        if params.drafts and DRAFTS not in given:
            words = (f"{DRAFTS}={json.dumps(NGRAMS)}", *words)
        config, geometry = prepared.config, prepared.geometry
        kept = config and geometry and kept_by_others(config.get_text_config(), geometry)
        check_built(chosen.model, geometry)
        if kept == "states":
            text = config.get_text_config()
            others = not number(text, "linear_num_value_heads")
            check_built(chosen.model, geometry, others=others)
            drafts, why = params.drafts or DRAFTS in given, "drafts do not work beside their states"
            check_built(chosen.model, geometry, others=drafts, why=why)
        asked = given.get(REQUESTS)
        if asked is None:
            sizes = chosen.device, chosen.gpu, chosen.tensor_parallel, prepared.flags.sizes()
            asked = str(prepared.demand(*sizes).usual_requests if geometry else UNKNOWN)
        if not asked.isdecimal() or int(asked) < 1:
            raise UsageError(f"{REQUESTS} {asked!r} is no number of requests.")
        return cls(chosen, tuple(words), int(asked), bool(kept))

    def shown(self, planned: LaunchPlan) -> LaunchPlan:
        """For a shell, where vLLM listens on loopback without our front."""
        sets = VARIABLES | first_gpu(self.options.gpu, planned.env) | settings_of(planned.argv)
        sets.pop(FRONT.variable)
        return replace(planned, argv=("vllm", *self._argv()), sets=sets)

    def started(self, planned: LaunchPlan) -> LaunchPlan:
        """For a process of ours."""
        env = environment(planned.env, self.options.gpu) | settings_of(planned.argv)
        program = children.python(*PROGRAM)
        argv = (*program, *self._argv("--enable-prompt-tokens-details", *OURS))
        return replace(planned, argv=argv, env=env, engine="vLLM")

    def facts(self, client: ServerClient) -> dict[str, Any]:
        """What a server says of itself; as `starting.read_facts`."""
        found = VllmClient.instead_of(client, asked=True)
        assert isinstance(found, VllmClient)
        told, bits = found.facts(), self.options.recipe.bits_per_element
        windows = {name: int(told.recipe[name]) for name in ("sink", "recent")}
        rows = self.requests * (windows["recent"] + 2 * windows["sink"])
        limited = self.mixed or LIMITS & dict(_pairs(self.words)).keys()
        return {
            "model_id": found.model_id,
            "engine": "vllm",
            "version": told.version,
            "capacity": told.capacity,
            "plain_capacity": None if limited else rows + int(told.capacity * bits / 16),
            "bits": bits,
            "windows": windows,
            "code_bits": told.recipe["bits"],
            "clip": {side: told.recipe[f"{side}_clip"] for side in ("k", "v")},
            "requests": self.requests,
            "context": told.longest_input,
        }

    def _argv(self, *ours: str) -> tuple[str, ...]:
        options = self.options
        flags = {
            "--kv-cache-dtype": DTYPE,
            "--distributed-executor-backend": "uni" if options.tensor_parallel == 1 else "mp",
            PARALLEL: str(options.tensor_parallel),
            "--host": options.host,
            "--port": str(options.port),
            "--served-model-name": options.served_name,
            "--revision": options.revision,
            REQUESTS: str(self.requests),
            FORMAT: FORMATS[0],
        }
        asked = dict(_pairs(self.words)).keys()
        words = [f"{k}={v}" for k, v in flags.items() if v is not None and k not in asked]
        return ("serve", options.model, *words, *ours, *self.words)


def environment(env: Mapping[str, str], gpu: int) -> dict[str, str]:
    """Of a process of ours on GPUs from `gpu` on, out of that of one of SGLang."""
    kept = {name: text for name, text in env.items() if not name.startswith(OF_SGLANG)}
    cache = {"VLLM_CACHE_ROOT": kept["TRITON_CACHE_DIR"].removesuffix("triton") + "vllm"}
    return kept | VARIABLES | cache | first_gpu(gpu, env)


def first_gpu(number: int, env: Mapping[str, str]) -> dict[str, str]:
    """vLLM takes the first GPUs that it sees, up to a number that this machine has not."""
    name = "CUDA_VISIBLE_DEVICES"
    seen = [one for one in env.get(name, "").split(",") if one]
    shown = seen[number:] or map(str, range(number, number + 8))
    return {name: ",".join(shown)} if number else {}


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Those of the plugin: vLLM's command line takes none, so they are variables."""
    given = dict(word.split("=", 1) for word in words if word.startswith("--oscar-"))
    return {one.variable: given[one.flag] for one in OPTIONS.values() if one.flag in given}


def spelled(words: Sequence[str]) -> tuple[str, ...]:
    """Flags with vLLM's own name for what people also know by others."""
    return tuple(re.sub(r"^(--tp|--tp-size|-tp)(?==|$)", PARALLEL, word) for word in words)


def check_words(words: Sequence[str]) -> dict[str, str]:
    """Flags of the user and their values; refuses what is none of `ALLOWED`."""
    given = dict(_pairs(words))
    for flag in given.keys() - ALLOWED:
        why = INSTEAD.get(flag, "it is none of the flags of vLLM that docs/vllm.md lists")
        near = () if flag in INSTEAD else difflib.get_close_matches(flag, ALLOWED, cutoff=0.65)
        raise UsageError(f"{flag} is not allowed after --: {why}.", suggestions=near)
    if given.get(FORMAT, "dummy") not in FORMATS:
        raise UsageError(f"{FORMAT} {given[FORMAT]} is not read here.", hint="leave it out")
    if DRAFTS in given and not _have_drafts(given[DRAFTS]):
        raise UsageError(
            f"{DRAFTS} {given[DRAFTS]} has no n-grams and no model of EAGLE3: {NOT_BUILT}.",
            hint=f"{DRAFTS}={json.dumps(NGRAMS)!r}",
        )
    return given


def _have_drafts(text: str) -> bool:
    try:
        asked = json.loads(text)
    except ValueError:
        return False
    if not isinstance(asked, dict) or str(asked.get("method")) not in METHODS:
        return False
    allowed = {*NGRAMS, *METHODS[asked["method"]]}
    return asked.keys() <= allowed and ("model" in asked) == ("model" in allowed)


def check_built(
    model: str, geometry: Geometry | None, *, others: bool = False, why: str = NOT_BUILT
) -> None:
    """Refuse a model that caches latents, or with `others` than layers with full attention."""
    what = "layers without full attention" if others else ""
    if geometry is not None and geometry.rotary_key:
        what = "latents (MLA)"
    if what:
        raise UnsupportedModel(
            f"{model} has {what}: {why}.", hint="SGLang has them: leave out --engine"
        )


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags and their values; a value may be the next word."""
    before = ""
    for word, behind in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            yield name.replace("_", "-"), value if equals else behind
        elif not before.startswith("-") or "=" in before:
            raise UsageError(f"{word!r} behind -- is no flag, and no value of one.")
        before = word
