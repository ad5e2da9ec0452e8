"""Ports of this machine for servers that tests and tools start."""

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST = 10_000
"""Ports of well-known servers are below this."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 1000
PORTS = 1 << 16


def free_port() -> int:
    """Returns a TCP port that is unused now, and that the kernel does not assign.

    A port found by binding to 0 may be taken again before the server binds it: by any connection that this machine
    opens meanwhile, and by the next bind to 0. So the port is outside of the range that those come from.

    Raises:
        OSError: there is no free port.
    """
    lowest, highest = map(int, RANGE.read_text("ascii").split())
    candidates: list[int] = [*range(LOWEST, lowest), *range(highest + 1, PORTS)]
    for port in random.sample(candidates, min(TRIES, len(candidates))):
        with socket.socket() as probe:
            # As servers do: a closed connection does not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {min(TRIES, len(candidates))} ports outside of {lowest} to {highest} is free")
