"""Lets `kvdepot` see no processes of other depots: Python imports this file at its start."""

import os
from pathlib import Path

from kvdepot.cli import processes

processes.PROC = Path(os.environ["XDG_RUNTIME_DIR"])
