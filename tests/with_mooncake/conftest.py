"""Mooncake's master and a holder of its memory, as processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lab.mooncake import Mooncake

HANG_S = 120


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """A master and a holder of 256 MiB."""
    environment = Path(os.environ["KVDEPOT_TEST_MOONCAKE"])
    with Mooncake(environment, tmp_path_factory.mktemp("mooncake")) as running:
        yield running
