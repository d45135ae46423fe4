"""`make gpu-check`: walk every documented path on this machine's GPU, print a table, write
docs/gpu-check.md."""

from __future__ import annotations

import argparse
import datetime
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import document
import machine
import steps
import window_drafts
from document import StepResult
from record import Record
from steps import Check

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/gpu-check.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 0 when everything passed, 1 when something failed or is missing."""
    chosen = _parser().parse_args(arguments)
    lacking = machine.missing(chosen.device)
    if lacking:
        print(f"error: {lacking}", file=sys.stderr)
        return 1
    work = chosen.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    # an empty lock keeps the lock of a project around this folder out
    (work / "oscar-zoo.lock").write_text('{"schema": "oscar-zoo.lock/1", "artifacts": []}\n')
    gpus = machine.visible()
    check = Check(work, chosen.device, tuple(shlex.split(chosen.engine_flags)))
    check = replace(check, gpu=gpus[0]) if gpus[1:] else check
    facts = machine.facts()
    started = time.monotonic()
    record = Record()
    try:
        results = _run_all(record, check, replace(check, gpu=gpus[1]) if gpus[1:] else None)
    except KeyboardInterrupt:
        results = record.stopped()
    seconds = time.monotonic() - started
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = document.section(
        facts, results, date=when, commit=chosen.commit or machine.commit(ROOT), seconds=seconds
    )
    print("\n" + made)
    if chosen.device == "cuda":
        old = chosen.document.read_text("utf-8") if chosen.document.exists() else ""
        chosen.document.write_text(document.merge(old, made), "utf-8")
        print(f"Written: {chosen.document}")
    return 0 if all(one.passed for one in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, writes nothing"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".gpu-check", help="folder for all state; emptied first"
    )
    parser.add_argument("--engine-flags", default="", help="more flags for SGLang, as one string")
    parser.add_argument("--commit", default="", help="commit to record where there is no git")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="file to write")
    return parser


def _run_all(record: Record, check: Check, beside: Check | None) -> list[StepResult]:
    """Every step, in the order of the document. What needs little of the GPU runs beside the rest;
    `bench serve` has a GPU for itself, at the end or on the second one (`beside`)."""
    steps.write_models(check)
    with ThreadPoolExecutor(11) as pool, record.until_interrupted(pool):
        measured = (
            pool.submit(record.timed, "bench serve", steps.bench_serve, beside) if beside else None
        )
        compiled = pool.submit(steps.precompile, check)
        kernels = pool.submit(record.timed, "kernel tests", steps.kernel_tests, check)
        experts = pool.submit(
            record.timed, "pull --compute, mixture of experts", steps.compute_experts, check
        )
        hybrid = pool.submit(record.timed, "compute, hybrid model", steps.compute_hybrid, check)
        windowed = pool.submit(
            record.timed, "compute, sliding windows", window_drafts.compute_windowed, check
        )
        mixed = pool.submit(record.timed, "compute --bits 2.75", steps.compute_mixed, check)
        captured = pool.submit(
            record.timed, "compute --engine sglang", steps.compute_with_engine, check
        )
        results = [record.timed("compute with defaults", steps.compute, check)]
        results.append(record.timed("verify, publish, pull", steps.publish_and_pull, check))
        in_process = pool.submit(record.timed, "eval in process", steps.evaluate, check)
        computed = (captured, experts, hybrid, windowed, mixed)
        results += [one.result() for one in computed]
        served = [
            pool.submit(record.timed, f"eval --engine sglang, {what}", step, check)
            for what, step in (
                ("mixture of experts", steps.serve_experts),
                ("hybrid model", steps.serve_hybrid),
                ("mixed widths", steps.serve_mixed),
                ("drafts of n-grams", steps.serve_ngrams),
                ("drafts of the model", steps.serve_own_drafts),
                ("hybrid model with drafts", steps.serve_hybrid_drafts),
            )
        ]
        served.append(
            pool.submit(
                record.timed,
                "serve --drafts, sliding windows",
                window_drafts.serve_windowed_drafts,
                check,
            )
        )
        results += [
            in_process.result(),
            kernels.result(),
        ]  # `serve` takes what is left of the GPU's memory
        results.append(record.timed("serve, second turn, eval --url", steps.serve, check))
        results += [one.result() for one in served]
        compiled.result()
        last = (
            measured.result() if measured else record.timed("bench serve", steps.bench_serve, check)
        )
    return [*results, last]


if __name__ == "__main__":
    sys.exit(main())
