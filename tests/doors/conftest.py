"""A tiny model, and registries that are restored after each test."""

import pytest
from helpers import registries


@pytest.fixture(autouse=True)
def _registered():
  with registries.registered():
    yield
