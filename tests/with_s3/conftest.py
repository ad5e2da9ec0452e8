"""A real S3 server with an empty bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lab.s3_server import Server


@pytest.fixture
def server(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one empty bucket."""
    made = Server(tmp_path / "s3", tmp_path_factory.mktemp("s"))
    with made.front:
        made.start()
        try:
            yield made
        finally:
            made.kill()
