"""A tiny model, and tables that are as they were after a test."""

import pytest
from helpers import registries


@pytest.fixture(autouse=True)
def _registered():
  with registries.registered():
    yield
