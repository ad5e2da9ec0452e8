"""One suite for two servers: ours (the default), and InfiniStore's own (--server=infinistore).

Tests that InfiniStore's server itself does not pass are marked ``peer_fault``: expected to fail there, never here.
"""

from collections.abc import Callable, Iterator

import pytest

from tools.wire.client import Peer
from tools.wire.servers import KINDS, STANDIN, Server, standin_verbs

NewPeer = Callable[..., Peer]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", choices=KINDS, default=KINDS[0], help="the server under test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rdma: needs RDMA")
    config.addinivalue_line("markers", "peer_fault(reason): InfiniStore's own server fails this")
    config.addinivalue_line("markers", "peer_fault_sometimes(reason): InfiniStore's own server may fail this")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--server") != "infinistore":
        return
    for item in items:
        for marker in item.iter_markers():
            if marker.name in {"peer_fault", "peer_fault_sometimes"}:
                item.add_marker(pytest.mark.xfail(reason=marker.args[0], strict=marker.name == "peer_fault"))


def start(request: pytest.FixtureRequest, **settings: object) -> Server:
    """A server of the kind under test; InfiniStore's own is skipped where it cannot run, ours never is."""
    kind = request.config.getoption("--server")
    if kind == "infinistore" and standin_verbs() is None:
        pytest.skip(f"InfiniStore's server needs a stand-in for libibverbs, named by {STANDIN}")
    return Server(kind, **settings)


@pytest.fixture(scope="session")
def tcp_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with start(request) as server:
        yield server


@pytest.fixture(scope="session")
def rdma_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if standin_verbs() is None:
        pytest.skip(f"RDMA needs a stand-in for libibverbs, named by {STANDIN}")
    with start(request, rdma=True) as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server without keys, the same process for all tests; it must be alive and answer after every test.

    It also has RDMA for tests that are marked accordingly.
    """
    shared_server = request.getfixturevalue("rdma_server" if request.node.get_closest_marker("rdma") else "tcp_server")
    if not shared_server.answers():
        shared_server.restart()
    shared_server.purge()
    starts = shared_server.starts
    yield shared_server
    assert shared_server.starts == starts
    assert shared_server.alive, f"the server died\n{shared_server.tail()}"
    assert shared_server.answers(), f"the server does not answer\n{shared_server.tail()}"


@pytest.fixture
def new_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Starts servers for a single test."""
    servers: list[Server] = []

    def make(**settings: object) -> Server:
        servers.append(start(request, **settings))
        return servers[-1]

    yield make
    for one in servers:
        one.close()


@pytest.fixture
def new_peer(server: Server) -> Iterator[NewPeer]:
    """Connects InfiniStore's client over TCP, any number of times."""
    peers: list[Peer] = []

    def connect(**settings: bool) -> Peer:
        peers.append(Peer(server, **settings))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(new_peer: NewPeer) -> Peer:
    """InfiniStore's client, connected over TCP."""
    return new_peer()


@pytest.fixture
def rdma_peer(new_peer: NewPeer) -> Peer:
    """InfiniStore's client, connected over RDMA."""
    return new_peer(rdma=True)
