"""An attacker who can write where artifacts lie: swaps, rewrites, cuts and links their files.

As a program: `swapping.py SWAPS SEED FOLDER GOOD OTHER`; FOLDER has the files of GOOD, OTHER has
files of the same names. It swaps so many times at least, and until its standard input ends. FOLDER
is as GOOD at the end.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path


def renamed(place: Path, data: bytes) -> None:
    """Put another file in the place of this one."""
    fresh = place.with_name(f".tmp.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.rename(place)


def rewritten(place: Path, data: bytes) -> None:
    """Write into the file as it is, whatever its mode."""
    place.chmod(0o600)
    with place.open("r+b") as stream:
        stream.write(data)


def cut(place: Path, data: bytes) -> None:
    """Leave half of the file."""
    place.chmod(0o600)
    os.truncate(place, len(data) // 2)


def linked(place: Path, data: bytes) -> None:
    """Let a link to another file take its place."""
    other = place.parent.with_suffix(".other")
    other.write_bytes(data)
    fresh = place.with_name(f".tmp.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(other)
    fresh.rename(place)


def gone(place: Path, data: bytes) -> None:
    """Remove it."""
    place.unlink()


SWAPS: tuple[Callable[[Path, bytes], None], ...] = (renamed, rewritten, cut, linked, gone)


def main() -> None:
    """Swap, and put back what was there after a moment."""
    count, seed, folder, good, other = sys.argv[1:]
    chance = random.Random(int(seed))
    names = [path.name for path in Path(good).iterdir()]
    swaps = itertools.count()
    while next(swaps) < int(count) or not select.select([sys.stdin], [], [], 0)[0]:
        name = chance.choice(names)
        swap = chance.choice(SWAPS)
        swap(Path(folder, name), Path(other, name).read_bytes())
        time.sleep(chance.choice((0, 0, 0.0005, 0.002)))
        if chance.random() < 0.7:
            renamed(Path(folder, name), Path(good, name).read_bytes())
            time.sleep(chance.choice((0, 0.001, 0.004)))
        elif not Path(folder, name).is_file() or Path(folder, name).is_symlink():
            renamed(Path(folder, name), Path(other, name).read_bytes())
    for name in names:
        renamed(Path(folder, name), Path(good, name).read_bytes())


if __name__ == "__main__":
    main()
