"""P2, P4, P7: malformed and awkward traffic, each fault against its own server."""

from collections.abc import Callable

import pytest

from tools.wire.faults import Fault, all_faults, run
from tools.wire.servers import STANDIN, Server, standin_verbs


@pytest.mark.peer_fault_sometimes("it dies of many of these")
@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: fault.name)
def test_the_server_withstands(fault: Fault, new_server: Callable[..., Server]) -> None:
    if fault.rdma and standin_verbs() is None:
        pytest.skip(f"RDMA needs a stand-in for libibverbs, named by {STANDIN}")
    server = new_server(rdma=fault.rdma)
    outcome = run(fault, server)
    assert outcome.good, f"{fault.promise}\n{outcome}\n{server.tail()}"
