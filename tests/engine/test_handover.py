"""Prefill and decode on different nodes: blocks stored by one engine's depot reach another's through a pool server."""

import pytest
from engine_lab import Lab
from test_vllm import generate, hits

from tools.wire.servers import Server


@pytest.mark.parametrize("layerwise", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_engine_finds_what_another_node_s_has_computed(real_lab: Lab, layerwise: bool) -> None:
    """Two engines, two depots that share only the server; their outputs are those of one engine (P1)."""
    runtime = real_lab.short_root()

    def node(name: str, server: Server) -> dict[str, object]:
        blocks = real_lab.root / name
        blocks.mkdir()
        return {
            "socket": str(runtime / f"{name}.sock"),
            "pipeline": "Cache|Remote|Posix",
            "directories": [str(blocks)],
            "remote_servers": [server.address],
            # Silence of a server that is alive: a busy machine must not reach it.
            "remote_timeout_ms": 60_000,
            "use_layerwise": layerwise,
        }

    plain = real_lab.run("llama", [generate("cold")], connector=None)
    with Server("kvdepot") as server:
        producer = node("producer", server)
        # The server has what was written back.
        settle = {"do": "settle", "socket": producer["socket"]}
        first = real_lab.run("llama", [generate("cold"), settle], options=producer)
        second = real_lab.run("llama", [generate("handed over")], options=node("consumer", server))
    assert first["cold"]["cached"] == [0, 0, 0]
    assert second["handed over"]["cached"] == hits(layerwise, "llama")
    assert first["cold"]["tokens"] == second["handed over"]["tokens"] == plain["cold"]["tokens"]
