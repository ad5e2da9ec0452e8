"""Ports of this machine for servers that tests and tools start."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
