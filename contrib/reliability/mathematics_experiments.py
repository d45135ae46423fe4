"""S15: rotations that are wrong are found by their statistics, and right ones pass."""

from __future__ import annotations

import tiny_artifacts as tiny
from experiment import Found, Scale
from mutants import MISTAKES, other_signs, spectra

from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.statistics import LIMIT, compare, fingerprint_bytes, read_fingerprint
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.artifact.writer import rotation_bytes

SIZES = (32, 64, 128)
SEEDS, FEW = 20, 1
RANGES = (1.0, 1e3, 1e6, 1e8)
"""How far the sizes of channels are apart, from seed to seed."""
MODEL = "Qwen/Qwen3-8B"


def mistakes_found(scale: Scale) -> Found:
    """Twelve mistakes and two right files in three sizes, many times; then without statistics."""
    missed: list[str] = []
    alarms: list[str] = []
    seen_alone = set(MISTAKES)
    worst_right, least_wrong = 0.0, float("inf")
    seeds = SEEDS if scale.whole else FEW
    for size in SIZES:
        for seed in range(seeds):
            matrices = spectra(RANGES[seed % len(RANGES)], 1000 * size + seed, size)
            right = tiny.rotation_set(matrices=matrices)
            data = fingerprint_bytes({"qq": matrices}, tiny.LAYERS, MODEL, None)
            fingerprint = read_fingerprint(data)
            for honest in (right, other_signs(right)):
                found = compare(honest, fingerprint, MODEL, None)
                distance = float("inf") if found is None else found.worst
                worst_right = max(worst_right, distance)
                if distance >= LIMIT:
                    alarms.append(f"a right file of {size} channels, seed {seed}: {found}")
            for name, mistake in MISTAKES.items():
                wrong = mistake(right)
                found = compare(wrong, fingerprint, MODEL, None)
                distance = 0.0 if found is None else found.worst
                least_wrong = min(least_wrong, distance)
                if distance <= LIMIT:
                    missed.append(f"{name}, {size} channels, seed {seed}: {found}")
                if _passes_alone(rotation_bytes(wrong)):
                    seen_alone.discard(name)
    figures: dict[str, int | float | str] = {
        "mistakes": len(MISTAKES) * len(SIZES) * seeds,
        "mistakes found": len(MISTAKES) * len(SIZES) * seeds - len(missed),
        "right files": 2 * len(SIZES) * seeds,
        "false alarms": len(alarms),
        "limit": LIMIT,
        "largest distance of a right file": f"{worst_right:.1e}",
        "smallest distance of a mistake": f"{least_wrong:.1e}",
        "found without statistics, too": ", ".join(sorted(seen_alone)) or "none",
        "seen by statistics only": ", ".join(sorted(set(MISTAKES) - seen_alone)),
    }
    return Found(figures, (*missed, *alarms))


def _passes_alone(data: bytes) -> bool:
    """Whether verification takes the file when there are no statistics."""
    return isinstance(verify_files({"k_rotation.pt": data}), Verified)
