"""Damage on a disk."""

import os

from tools.monitoring.load import BLOCK_BYTES, Engine, Site


def damage(site: Site, engine: Engine) -> None:
    """Changes a byte of each block that the engine has stored on the disk."""
    files = [path for path in site.home.files() if path.suffix == ".kvb" and engine.namespace in str(path)]
    assert files
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - BLOCK_BYTES // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
