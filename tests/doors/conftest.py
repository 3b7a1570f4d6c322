"""A tiny model, and tables that are as they were after a test."""

import pytest
from helpers import registries, tiny_run


@pytest.fixture(scope="session")
def model(tmp_path_factory):
  return tiny_run.write_model(tmp_path_factory.mktemp("doors") / "tiny")


@pytest.fixture(autouse=True)
def _registered():
  with registries.registered():
    yield
