"""Make a Python environment out of folders, for a GPU machine without a network and without pip.

    python3 contrib/offline_gpu/environment.py /tmp/env-s /tmp/own /tmp/sglang/site
    python3 contrib/offline_gpu/environment.py /tmp/env-v /tmp/own /tmp/vllm
    /tmp/env-s/bin/python tests/gpu_check/run.py --vllm-python /tmp/env-v/bin/python --commit ...

The first argument is the environment, the others are folders of packages: wheels and zip files in
them are unpacked where they lie. Earlier folders come before later ones, and the packages of the
Python that runs this (torch and triton of the machine) come last. A `sitecustomize.py` in a folder
is run at start. This checkout is installed too, with its command `oscar-zoo` and its plugins.

What the folders need beside an engine, made on a machine with a network:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d own \\
        click rich platformdirs markdown-it-py mdurl pygments modelscope-hub sgl-deep-gemm

The example's `eval --engine sglang` needs `soundfile` too, where vLLM must not see it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """#!{python}
import sys
from oscar_zoo.cli.main import main
sys.exit(main())
"""


def main(environment: Path, *folders: Path) -> None:
    made = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(made, check=True)
    python = environment.absolute() / "bin/python"
    packages = Path(_of(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    lines = [str(_linked(environment.absolute() / "checkout"))]
    for folder in map(Path.absolute, folders):
        for archive in [*folder.glob("*.whl"), *folder.glob("*.zip")]:
            zipfile.ZipFile(archive).extractall(folder)  # of the one who made this folder
            archive.unlink()
        lines.append(str(folder))
        started = folder / "sitecustomize.py"
        if started.is_file():
            lines.append(f"import runpy; runpy.run_path({str(started)!r})")
    lines += dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (packages / "folders.pth").write_text("\n".join(lines) + "\n")
    command = environment / "bin/oscar-zoo"
    command.write_text(COMMAND.format(python=python))
    command.chmod(0o755)
    print(_of(python, "import oscar_zoo, torch; print(oscar_zoo.__file__, torch.__version__)"))


def _linked(folder: Path) -> Path:
    """A folder with the packages of this checkout as an installation has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folder.mkdir(exist_ok=True)
    for package, source in project["tool"]["setuptools"]["package-dir"].items():
        place = folder / package.replace(".", "/")
        if place.parent == folder:
            place.mkdir(exist_ok=True)
            for one in (ROOT / source).iterdir():
                _link(place / one.name, one)
        else:
            _link(place, ROOT / source)
    information = folder / f"oscar_zoo-{project['project']['version']}.dist-info"
    information.mkdir(exist_ok=True)
    named = f"Name: oscar-zoo\nVersion: {project['project']['version']}\n"
    (information / "METADATA").write_text("Metadata-Version: 2.1\n" + named)
    points = ""
    for group, rows in project["project"]["entry-points"].items():
        points += f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in rows.items())
    (information / "entry_points.txt").write_text(points)
    return folder


def _link(place: Path, target: Path) -> None:
    if not os.path.lexists(place):
        place.symlink_to(target)


def _of(python: Path, line: str) -> str:
    said = subprocess.run([python, "-c", line], check=True, stdout=subprocess.PIPE, text=True)
    return said.stdout.strip()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
