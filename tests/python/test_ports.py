"""Ports of servers that tests start are not taken by anything else on the machine in the meantime."""

import socket

from tools.lab.ports import LOOPBACK, RANGE, free_port


def test_the_kernel_hands_a_free_port_to_nobody_else():
    lowest, highest = map(int, RANGE.read_text("ascii").split())
    found = [free_port() for _ in range(100)]
    assert all(not lowest <= port <= highest for port in found)
    assert len(set(found)) > 90


def test_a_port_in_use_is_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind((LOOPBACK, free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        other = free_port()
        monkeypatch.setattr("random.sample", lambda ports, count: [port, other])
        assert free_port() == other
