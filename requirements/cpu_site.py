"""Let `python -m sglang.launch_server` start in this environment, when its torch is a build for
CPUs.

`make install` runs it. `oscar-zoo serve` sets the same up for its own child, through PYTHONPATH;
here a `.pth` file does it for every program of the environment. Where torch supports CUDA, no file
is written and an earlier one is removed.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from oscar_zoo.engines.sglang.launch.plan import cpu_site_dir

PLACE = Path(sysconfig.get_path("purelib")) / "oscar-zoo-cpu.pth"

if torch.version.cuda is None:
    # Where the system has a `sitecustomize` of its own, the one of the folder is not found: hence
    # the import.
    PLACE.write_text(f"{cpu_site_dir()}\nimport oscar_zoo.models.torchvision_ops\n")
else:
    PLACE.unlink(missing_ok=True)
