"""The client of docs/deploy.md, as it is there, finds what it has stored."""

import re
import subprocess
import sys
from pathlib import Path

from tools.wire.servers import Server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
HANG_S = 100


def test_the_client_of_the_documentation_hits(server: Server) -> None:
    (program,) = re.findall(r"```python\n(import ctypes, infinistore\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert program.count("service_port=22345") == 1
    program = program.replace("service_port=22345", f"service_port={server.port}")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=HANG_S, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "hit b'the KV of a block" in done.stdout
