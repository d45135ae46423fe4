"""How long the zoo's page takes to build, from a hub of many artifacts that is made for it.

    python contrib/benchmarks/site_speed.py [ARTIFACTS] [--reports]

Every artifact has a manifest with figures and charts, and with --reports the report of a fit of 36
layers beside it; there are no rotation files. The command is timed as a whole, its start included.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

from measured_artifacts import measured_manifest
from site_pages import QUALITY, sample_report
from tiny_artifacts import FILE_NAME, write_folder


def main(number: int, reports: bool) -> None:
    """Make the hub, build the site and print how long that took."""
    made, report = measured_manifest(), sample_report(36).to_bytes()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for index in range(number):
            name = f"Model-{index // 4}/seq512_prompt{index + 1}_group64"
            one = made.model_copy(update={"id": name, "quality": QUALITY})
            folder = write_folder(root / "hub" / name, {FILE_NAME: one.to_bytes()})
            if reports:
                folder.with_name(f"{folder.name}.report.json").write_bytes(report)
        command = [sys.executable, "-c", "from oscar_zoo.cli.main import main; main()"]
        start = time.perf_counter()
        words = ["site", "--output", str(root / "site"), "--hub", f"file:{root / 'hub'}"]
        subprocess.run([*command, *words], check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = used.ru_utime + used.ru_stime
        wall = time.perf_counter() - start
        print(f"{number} artifacts in {wall:.2f} s, {processor:.2f} s of them on a processor")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers[0] if numbers else 1000, "--reports" in sys.argv)
