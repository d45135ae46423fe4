"""A process that publishes, yanks and mirrors on command, with a real hub client of either version.

One JSON object per line in, one per line out. Starting it costs a second, so tests share one per
client version.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from hub_uses import HUB_2


class Publisher:
    """A child that is told what to do; `environment` is all of its variables, `version` that of
    huggingface_hub, and its state is in `folder`."""

    def __init__(self, environment: Mapping[str, str], folder: Path, version: int) -> None:
        state = {
            f"OSCAR_ZOO_{name}": str(folder / name.lower())
            for name in ("CACHE", "DATA", "STATE", "CONFIG")
        }
        path = {"PYTHONPATH": str(HUB_2)} if version == 2 else {}
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            env={**environment, **state, **path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._cache = folder / "cache"
        self.client = self.do("version")

    def start(self, what: str, **arguments: Any) -> Self:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._child.stdin.flush()
        return self

    def answer(self) -> Any:
        """What the last command returned, or `{"error": code, ..}`."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the publisher died"
        return json.loads(line)

    def do(self, what: str, **arguments: Any) -> Any:
        return self.start(what, **arguments).answer()

    def forget(self) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)

    def close(self) -> None:
        self._child.communicate(timeout=300)


def main() -> None:
    """Obey until stdin ends; stdout carries answers only."""
    from oscar_zoo.errors import OscarZooError
    from oscar_zoo.registry import changes

    changes._JITTER_SECONDS = 0.02  # this network is fast
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = _DO[command.pop("do")](**command)
        except OscarZooError as error:
            answer = {"error": error.code, "message": error.message, "hint": error.hint}
        print(json.dumps(answer), flush=True)


def _version() -> str:
    import huggingface_hub

    return huggingface_hub.__version__


def _publish(folder: str, hub: str, **options: Any) -> dict[str, Any]:
    from hub_uses import publish

    from oscar_zoo.registry.hubs.address import open_hub

    result = publish(Path(folder), open_hub(hub), **options)
    facts = ("already_published", "digest", "revision", "proposal", "tag", "warnings")
    return {name: getattr(result, name) for name in facts}


def _status(name: str, hub: str, state: Any, **options: Any) -> dict[str, Any]:
    from oscar_zoo.registry.hubs.address import open_hub
    from oscar_zoo.site.status import set_status

    result = set_status(open_hub(hub), name, state, **options)
    return {"changed": result.changed, "serial": result.serial, "revision": result.revision}


def _mirror(source: str, target: str, names: list[str], **options: Any) -> dict[str, str]:
    from oscar_zoo.registry.hubs.address import open_hub
    from oscar_zoo.registry.mirror import copy_all

    results = copy_all(open_hub(source), open_hub(target), names, **options)
    return {str(result.id): result.outcome for result in results}


_DO = {"version": _version, "publish": _publish, "status": _status, "mirror": _mirror}

if __name__ == "__main__":
    main()
