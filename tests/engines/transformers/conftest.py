"""Kernels are interpreted where there is no GPU."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import triton_interpreter  # noqa: F401
from tiny_artifacts import artifact_files, write_folder
from tiny_models import EXAMPLE
from torch import Tensor

from oscar_zoo.evaluate.generate import GenerationRequest

NEARLY = 0.1
"""By so much in log-probability a token may lead another one that a GPU takes, which rounds."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def replayed() -> Callable[[GenerationRequest, Tensor, Tensor], list[int]]:
    """What the reference takes behind its last logits, if `new` tokens come one after the other;
    where a GPU took one that is nearly as likely, that one."""

    def replay(request: GenerationRequest, logits: Tensor, new: Tensor) -> list[int]:
        found = []
        for token in new.tolist():
            odds = logits.float().log_softmax(-1)
            near = odds.is_cuda and odds.max() - odds[token] <= NEARLY
            found.append(token if near else int(odds.argmax()))
            logits = request.decode(token)
        return found

    return replay


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example `model`, which chats, and an `artifact` for it."""
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(EXAMPLE, root / "model")
    write_folder(root / "artifact", artifact_files())
    return root
