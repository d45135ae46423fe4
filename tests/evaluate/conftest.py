"""The models that most evaluations are tested with, in float32."""

import pytest
from tiny_models import EXAMPLE, write_model

from oscar_zoo.models.loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A random one with 256 positions."""
    return load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture(scope="module")
def example() -> LoadedModel:
    """The one that was trained."""
    return load_model(str(EXAMPLE), dtype="float32")
