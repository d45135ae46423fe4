"""Kernels of a server are compiled in a process of their own, from the moment that the shape of the
model is known, while workers start and load weights.

Whatever goes wrong here is no error of the server: its workers compile what they do not find, and
say what is wrong in their own words.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from oscar_kernels import nvrtc
from oscar_kernels.spec import QuantSpec
from oscar_zoo import children
from oscar_zoo.children import Child
from oscar_zoo.engines.sglang import (
    compile_flashinfer,
    compile_lock,
    compile_program,
    worker,
)
from oscar_zoo.engines.sglang.compat import server_arguments
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.worker_errors import DEBUG
from oscar_zoo.runtime.rehearsal import Worker

logger = logging.getLogger(__name__)

LEARNED_SINKS = frozenset(("gpt_oss",))
"""Types of models whose attention has learned sinks."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables of the process, which forks."""


def start(args: Any) -> None:
    """Begin to compile for a server with these arguments, if it runs on a GPU of NVIDIA."""
    os.environ.pop(compile_lock.VARIABLE, None)  # an earlier engine of this process may have had it
    resolved = server_arguments.resolved(args)
    if not str(resolved.device).startswith("cuda"):
        return
    try:
        nvrtc.version()
        wanted = request(args, resolved)
        compile_flashinfer.spawn(prefill(wanted))
        spawn(wanted)
    except Exception as error:  # see above
        told = f"{type(error).__name__}: {error}"
        logger.info("INT2 KV cache: nothing is compiled ahead (%s)", " ".join(told.split()))


def request(args: Any, resolved: Any) -> compile_program.Request:
    """What is to be compiled for a server."""
    model = server_arguments.model_config(args)
    layout = Layout.make(
        tp=resolved.tp_size or 1,
        pp=resolved.pp_size or 1,
        dp=resolved.dp_size or 1,
        dp_attention=bool(resolved.enable_dp_attention),
        attn_dp=getattr(resolved, "attn_dp_size", None) or 1,
    )
    ranks = layout.attention_ranks
    chosen, first = worker.served()[0], dict[tuple[QuantSpec, QuantSpec], int]()
    for layer, specs in worker.layer_specs(model).items():
        first.setdefault(specs, layer)
    text = model.hf_text_config
    drafts = resolved.speculative_num_draft_tokens if resolved.speculative_algorithm else None
    chain = resolved.speculative_eagle_topk == 1 and resolved.speculative_algorithm != "NGRAM"
    return compile_program.Request(
        gpu=resolved.base_gpu_id or 0,
        layers=tuple(first.values()),
        worker=Worker(
            specs=tuple(first),
            num_q_heads=int(model.num_attention_heads) // ranks,
            num_kv_heads=int(model.get_num_kv_heads(ranks)),
            sink=chosen.sink.value,
            recent=chosen.recent.value,
            dtype=str(model.dtype).removeprefix("torch."),
            cap=float(getattr(text, "attn_logit_softcapping", None) or 0),
            learned_sinks=text.model_type in LEARNED_SINKS,
            drafts=int(drafts or 1),
            tree=not chain,
            requests=max(1, int(resolved.max_running_requests or 1) // layout.workers),
            max_tokens=int(model.context_len),
        ),
    )


def prefill(wanted: compile_program.Request) -> compile_flashinfer.Wanted:
    """What FlashInfer compiles for the workers of a request."""
    shapes = wanted.worker
    k_spec, v_spec = shapes.specs[0]
    return compile_flashinfer.Wanted(
        gpu=wanted.gpu,
        head_dims=(k_spec.head_dim, v_spec.head_dim),
        dtype=shapes.dtype,
        capped=shapes.cap > 0,
    )


def spawn(wanted: compile_program.Request) -> None:
    """Start the process, and have the workers of this server wait for it."""
    command = children.python("-m", compile_program.__name__, str(os.getpid()))
    with compile_lock.held() as (descriptor, path):
        process = children.start(
            command,
            stdin=subprocess.PIPE,
            stderr=None if os.environ.get(DEBUG) == "1" else subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env={**os.environ, **ONE_THREAD},
            text=True,
        )
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(str(wanted))
    os.environ[compile_lock.VARIABLE] = str(path)
    threading.Thread(target=_end, args=(process, path), daemon=True).start()


def _end(process: Child[str], path: Path) -> None:
    process.wait()
    path.unlink(missing_ok=True)
