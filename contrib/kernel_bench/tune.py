"""Find the best tiles of this GPU and print the tables of tiles. Nothing is edited.

    python contrib/kernel_bench/tune.py                  all of them
    python contrib/kernel_bench/tune.py --only read,write
    python contrib/kernel_bench/tune.py --dry-run        tiny shapes, without a GPU too

The tables go to standard output, every trial to standard error. Tiles that do not compile or fit
are passed over. Of the write kernel `parts` is not tried: it decides how many codes differ from the
reference; and one choice must serve a prefill and a decode step, which have to sum in the same
order. Run the GPU tests after pasting.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from ops import OpPlan
    from roofline import Heads

ROOT = Path(__file__).resolve().parents[2]
OPS = ("decode", "merge", "extend", "write", "read")

ATTENTION = {
    "splits": (), "exact_splits": (1, 2, 4), "block_n": (32, 64, 128), "exact_block_n": (16, 32),
    "num_warps": (1, 2, 4), "stages": (2, 3, 4, 5),
}  # fmt: skip
WRITE = {
    "block_m": (32, 64, 128),
    "block_k": (32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2),
    "programs": (16, 32, 64),
}
MERGE = {"step": (16, 64, 256), "channels": (32, 64, 128), "warps": (1, 2, 4)}
READ = {"block_m": (8, 16, 32, 64), "warps": (1, 2, 4)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    sys.path.insert(0, str(ROOT / "kernels"))
    sys.path.append(str(ROOT / "tests/kernels"))
    unknown = set(options.only) - set(OPS)
    if unknown:
        _note(f"no op is called {', '.join(sorted(unknown))}; there are {', '.join(OPS)}")
        return 2
    import torch

    if not torch.cuda.is_available():
        if not options.dry_run:
            _note("no CUDA device; --dry-run runs tiny shapes without one")
            return 2
        os.environ["TRITON_INTERPRET"] = "1"
    import ops

    plan = ops.DRY if options.dry_run else ops.QUICK
    torch.manual_seed(0)
    search = {"decode": _decode, "merge": _merge, "extend": _extend, "write": _write, "read": _read}
    for name in options.only or OPS:
        for line in search[name](plan, options.dry_run):
            print(line, flush=True)
    return 0


def _decode(plan: OpPlan, dry: bool) -> Iterator[str]:
    """Per shape, the best tiles beside those of the table, and the constants that would give
    them."""
    import cases
    import ops
    import roofline

    from oscar_kernels.decode_attention import launcher, tuning

    yield "# decode_attention/tuning.py, decode_tiles"
    for heads in _geometries(plan.heads, dry):
        for number, length in plan.decode[: 1 if dry else None]:
            lengths = [length] * number
            job = cases.attention_layers(
                heads, lengths, cases.layers(roofline.decode(heads, lengths), plan.layers)
            )
            start = launcher._decode_tiles(job.caches[0], number, job.query.shape[1])

            def clock(tiles: Any, job: cases.AttentionLayers = job) -> float:
                with mock.patch.object(tuning, "decode_tiles", lambda **_: tiles):
                    return _seconds(lambda: ops.decode_calls(launcher, job), plan)

            best, words = _best(start, _with_splits(start, dry), clock)
            wave = (
                (best.splits + best.exact_splits) * number * heads.num_kv_heads / _multiprocessors()
            )
            yield f"# {_shape(heads)}, {number} x {length}: {words}; PROGRAMS_PER_SM = {wave:.0f}"
            yield f"#   {best}"


@dataclass(frozen=True)
class Merge:
    """A value of the table `MERGE`."""

    step: int
    channels: int
    warps: int


def _merge(plan: OpPlan, dry: bool) -> Iterator[str]:
    """The table of stage 2, by the number of splits that each shape of decode has."""
    import cases
    import ops
    import roofline

    from oscar_kernels.decode_attention import launcher, tuning

    yield "# decode_attention/tuning.py, MERGE"
    seen: set[int] = set()
    for number, length in plan.decode:
        lengths = [length] * number
        job = cases.attention_layers(
            plan.heads, lengths, cases.layers(roofline.decode(plan.heads, lengths), plan.layers)
        )
        splits = launcher._decode_tiles(job.caches[0], number, job.query.shape[1]).partials
        most = next(most for most in tuning.MERGE if splits <= most)
        if most in seen:
            continue
        seen.add(most)

        def clock(tiles: Any, job: cases.AttentionLayers = job) -> float:
            with mock.patch.object(tuning, "merge_tiles", lambda *_: astuple(tiles)):
                return _seconds(lambda: ops.decode_calls(launcher, job), plan)

        best, words = _best(Merge(*tuning.MERGE[most]), _few(MERGE, dry), clock)
        yield f"    {most}: {astuple(best)},  # {number} x {length}, {splits} splits: {words}"


def _extend(plan: OpPlan, dry: bool) -> Iterator[str]:
    import cases
    import ops

    from oscar_kernels.decode_attention import launcher, tuning

    yield "# decode_attention/tuning.py, extend_tiles"
    (new, length), heads = plan.extend, plan.heads
    for tokens in (new,) if dry else (new, 16):
        job = cases.attention_layers(heads, [length], 2, new=tokens)
        usual = launcher._extend_tiles(job.caches[0], tokens, 1, job.query.shape[1])

        def clock(tiles: Any, job: cases.AttentionLayers = job) -> float:
            with mock.patch.object(tuning, "extend_tiles", lambda **_: tiles):
                return _seconds(lambda: ops.extend_calls(job), plan)

        shapes = [usual] if dry else [usual, *_extend_shapes(usual, tokens, heads)]
        start = min(shapes, key=lambda tiles: _told(tiles, clock(tiles)))
        best, words = _best(start, _with_splits(start, dry), clock)
        yield f"# {_shape(heads)}, {tokens} over {length}: {words}"
        yield f"#   {best}"


def _extend_shapes(usual: Any, tokens: int, heads: Heads) -> Iterator[Any]:
    """More query rows of a program unpack a tile of codes for more queries; they need more warps
    and fewer splits."""
    for rows, warps in ((16, 2), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)):
        each = rows // heads.group
        programs = (-(-tokens // each) + 1) * heads.num_kv_heads
        for stages in (2, 3):
            splits = max(1, min(512, round(32 * _multiprocessors() / warps / programs)))
            yield replace(
                usual, rows=rows, tokens=each, num_warps=warps, splits=splits, stages=stages
            )


def _told(tiles: Any, seconds: float) -> float:
    _note(f"{seconds * 1e6:9.1f} us  {tiles}")
    return seconds


def _write(plan: OpPlan, dry: bool) -> Iterator[str]:
    """One choice for a decode step and a prefill: the least geometric mean of both times."""
    import cases
    import ops

    from oscar_kernels.kv_write import launcher

    yield "# kv_write/launcher.py, write_tiles"
    for heads in _geometries(plan.heads, dry):
        jobs = [
            (True, [cases.write_layer(heads, [30_000] * plan.step, 1) for _ in range(plan.layers)]),
            (False, [cases.write_layer(heads, [0], plan.prefill) for _ in range(2)]),
        ]
        start = launcher.usual_tiles(jobs[0][1][0].key, jobs[0][1][0].cache)

        def clock(tiles: Any, jobs: Any = jobs) -> float:
            both = [
                _seconds(partial(ops.write_calls, layers, step=step, tiles=tiles), plan)
                for step, layers in jobs
            ]
            return math.sqrt(math.prod(both))

        best, words = _best(start, _few(WRITE, dry), clock)
        yield f"# {_shape(heads)}: {words}"
        yield f"return {best}"


def _read(plan: OpPlan, dry: bool) -> Iterator[str]:
    import cases
    import ops

    from oscar_kernels import kv_read

    yield "# kv_read.py, read_tiles"
    number, length = plan.read[0]
    cache, batch = cases.cached_batch(plan.heads, [length] * number)
    rows = cases.normal(
        2, number * length, plan.heads.num_kv_heads, plan.heads.k_spec.head_dim
    ).unbind()

    def clock(tiles: Any) -> float:
        return _seconds(lambda: ops.read_calls(cache, batch, *rows, tiles=tiles), plan)

    best, words = _best(kv_read.read_tiles(plan.heads.k_spec.head_dim), _few(READ, dry), clock)
    yield f"# {_shape(plan.heads)}, {number} x {length}: {words}"
    yield f"return {best}"


def _best(
    start: Any, values: Mapping[str, tuple[int, ...]], clock: Callable[[Any], float]
) -> tuple[Any, str]:
    from search import descend

    best, seconds, before = descend(start, values, clock, note=_note)
    return best, f"{before * 1e6:.1f} us in use, {seconds * 1e6:.1f} us"


def _seconds(make: Callable[[], Sequence[Callable[[], object]]], plan: OpPlan) -> float:
    """Median seconds; infinity if the tiles cannot run."""
    from timing import timed

    try:
        return timed(make(), replays=plan.replays).median
    except Exception as error:  # Triton has no class for all that a compiler may refuse
        _note(
            f"    {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
        )
        return math.inf


def _with_splits(start: Any, dry: bool) -> Mapping[str, tuple[int, ...]]:
    near = sorted({max(1, round(start.splits * part)) for part in (0.5, 0.75, 1.5, 2)})
    return _few({**ATTENTION, "splits": tuple(near)}, dry)


def _few(values: Mapping[str, tuple[int, ...]], dry: bool) -> Mapping[str, tuple[int, ...]]:
    """Two fields are enough to see that a search runs."""
    return dict(list(values.items())[-2:]) if dry else values


def _geometries(heads: Heads, dry: bool) -> list[Heads]:
    """Those that have tiles of their own: wide heads, and more query heads than one tile of
    rows."""
    if dry:
        return [heads]
    wide = [replace(spec, head_dim=256) for spec in (heads.k_spec, heads.v_spec)]
    return [heads, replace(heads, group=12), replace(heads, k_spec=wide[0], v_spec=wide[1])]


def _shape(heads: Heads) -> str:
    return f"head_dim {heads.k_spec.head_dim}, group {heads.group}"


def _multiprocessors() -> int:
    import torch

    return (
        torch.cuda.get_device_properties(0).multi_processor_count
        if torch.cuda.is_available()
        else 1
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Print the best tiles of this GPU; every trial on standard error."
    )
    parser.add_argument(
        "--only", type=lambda x: x.split(","), default=[], help=f"some of {','.join(OPS)}"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes; without a GPU, Triton's interpreter"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
