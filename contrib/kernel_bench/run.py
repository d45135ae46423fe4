"""Benchmark the cache kernels on this GPU: correctness first, then CSV on standard output, notes on
standard error.

    run.py > h200.csv                 everything, beside FlashInfer (BF16, FP8, XQA) where it is
                                      installed; the winner of each case on standard error
    run.py --quick                    our kernels alone, fewer repeats, under a minute
    run.py --only decode,write
    run.py --only decode --bits 4,2   codes of 4 bits for K and of 2 for V
    run.py --only decode --heads 4x16x128 --decode 4x60000,16x30000
                                      other heads, and other batches
    run.py --only decode --drafts 4   the verification of 4 drafts of each request too
    run.py --variants                 variants that the tables name, where a fused extend stops,
                                      what attention adds to a step of a model, parts of a prefill
    run.py --dry-run                  tiny shapes, without a GPU too: times mean nothing

A check or a case that fails loses the rest of its op, not of the run; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from results import ResultRow

ROOT = Path(__file__).resolve().parents[2]
OPS = ("decode", "extend", "write", "read", "baseline")
VARIANTS = ("decode", "write", "crossover", "step", "prefill")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    known = VARIANTS if options.variants else OPS
    unknown = set(options.only) - set(known)
    if unknown:
        _note(f"no op is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return 2
    sys.path.insert(0, str(ROOT / "kernels"))
    sys.path.append(str(ROOT / "tests/kernels"))
    import torch

    if not torch.cuda.is_available():
        if not options.dry_run:
            _note("no CUDA device; --dry-run runs tiny shapes without one")
            return 2
        os.environ["TRITON_INTERPRET"] = "1"
    import in_step
    import ops
    import prefill
    import results
    import timing
    import variants

    plan = ops.DRY if options.dry_run else ops.QUICK if options.quick else ops.FULL
    heads = plan.heads.of_shape(*options.heads) if options.heads else plan.heads
    heads = replace(heads.with_bits(*options.bits), feedback=options.feedback)
    decode = options.decode or plan.decode
    plan = replace(plan, heads=heads, decode=decode, drafts=options.drafts)
    chosen = options.only or [name for name in known if not (options.quick and name == "baseline")]
    torch.manual_seed(0)
    failed: list[str] = []
    bench = ops.OpBench(plan, timing.bandwidth(), _note)
    more = {
        "decode": variants.decode,
        "write": variants.write,
        "crossover": variants.crossover,
        "step": in_step.step,
        "prefill": prefill.prefill,
    }
    runs = {
        name: partial(more[name], bench) if options.variants else getattr(bench, name)
        for name in chosen
    }
    rows = _rows(runs, failed)
    given = [f"K{k} V{v}" for k, v in [options.bits] if (k, v) != (2, 2)]
    if options.feedback:
        given.append("feedback")
    if options.heads:
        given.append(" x ".join(map(str, options.heads)))
    if given:
        rows = (replace(row, case=", ".join([*given, row.case])) for row in rows)
    for line in results.winners(results.write_rows(rows, sys.stdout)):
        _note(line)
    return 1 if failed else 0


def _rows(
    runs: Mapping[str, Callable[[], Iterator[ResultRow]]], failed: list[str]
) -> Iterator[ResultRow]:
    for name, run in runs.items():
        try:
            yield from run()
        except (
            Exception
        ):  # whatever goes wrong in one op: the others are worth having, and the status tells
            failed.append(name)
            _note(f"{name} failed:\n{traceback.format_exc()}")


def _widths(text: str) -> tuple[int, int]:
    k, v = (int(part) for part in text.split(","))
    return k, v


def _shape(text: str) -> tuple[int, int, int]:
    num_kv_heads, group, dim = (int(part) for part in text.split("x"))
    return num_kv_heads, group, dim


def _batches(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (part.split("x") for part in text.split(","))
    return tuple((int(batch), int(length)) for batch, length in pairs)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Benchmark the INT2 cache kernels; CSV on standard output."
    )
    some = f"some of {','.join(OPS)}; with --variants of {','.join(VARIANTS)}"
    parser.add_argument("--only", type=lambda x: x.split(","), default=[], help=some)
    parser.add_argument("--quick", action="store_true", help="no baseline, fewer repeats")
    parser.add_argument(
        "--bits",
        type=_widths,
        default=(2, 2),
        metavar="K,V",
        help="bits of the codes of K and of V, 2 or 4; 2,2 by default",
    )
    parser.add_argument(
        "--heads",
        type=_shape,
        metavar="HxGxD",
        help="KV heads, query heads of each, and channels; 8x4x128 by default",
    )
    parser.add_argument(
        "--decode",
        type=_batches,
        default=(),
        metavar="BxN,...",
        help="batches and cached tokens of a request for decode",
    )
    parser.add_argument(
        "--drafts",
        type=int,
        default=0,
        metavar="N",
        help="drafts of each request that decode verifies too, beside plain steps",
    )
    parser.add_argument(
        "--feedback", action="store_true", help="keys are rounded with feedback when written"
    )
    parser.add_argument(
        "--variants", action="store_true", help="what the tables leave open; see variants.py"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes; without a GPU, Triton's interpreter"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
