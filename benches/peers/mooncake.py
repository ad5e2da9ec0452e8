"""Mooncake's own client, and kvdepot over its pool server and over Mooncake: values between processes, by TCP."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benches.peers.comparison import MEASURED, WARM_UP, Comparison, Outcome, counted, held_bytes
from benches.peers.lab import Environment, Process, gb_s, removed_at_the_end
from benches.peers.mooncake_store import MooncakeStore
from benches.peers.results import Metric
from benches.peers.work import GIB, MIB, Shape
from tools.wire.servers import Server

MOONCAKE = Environment(
    name="Mooncake",
    directory=".venv-mooncake",
    target="mooncake-env",
    probe="import mooncake.store, numpy, importlib.metadata as m; "
    "print(m.version('mooncake-transfer-engine-non-cuda'))",
    environ={"LD_LIBRARY_PATH": "{root}/lib-verbs", "MC_LOG_LEVEL": "ERROR"},
)
REMOTE, THROUGH, CLIENT = "kvdepot Cache|Remote", "kvdepot Cache|Mooncake", "Mooncake"
AGAIN = 3
"""An epoch whose restore touches memory for the first time."""
POOL_EPOCHS = 5
"""A claim gets a quarter of the pool at most."""


class Mooncake(Comparison):
    """The comparison."""

    name = "mooncake"
    title = "Pool server beside Mooncake, over loopback (values of one shard)"
    metrics = (
        Metric("ack_gb_s", "put acknowledged GB/s"),
        Metric("put_gb_s", "put GB/s"),
        Metric("get_gb_s", "get GB/s"),
        Metric("restore_gb_s", "restore GB/s"),
        Metric("hit_us", "get of one value us", 0, rate=False),
    )
    shapes = (Shape(64, 1, 2048), Shape(256, 1, 512), Shape(1024, 1, 128), Shape(4096, 1, 32))
    smoke_shapes = (Shape(64, 1, 16),)
    ours = (REMOTE, THROUGH)
    peers = (CLIENT,)
    needs = MappingProxyType({THROUGH: MOONCAKE, CLIENT: MOONCAKE})
    beside = MappingProxyType({THROUGH: REMOTE})
    smoke_sides = (*ours, *peers)

    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Puts from one process, and gets in two others, over a fresh server."""
        held = held_bytes(shape) + shape.bytes
        with ExitStack() as stack:
            directory = stack.enter_context(removed_at_the_end(self.place.disk / f"mooncake-{round_}"))
            if side == REMOTE:
                pool_gib = -(-held // GIB)
                server = Server("kvdepot", pool_gib=pool_gib)
                stack.callback(server.close)
                settings = self._depot(shape, {"pipeline": "Cache|Remote", "remote_servers": [server.address]})
            else:
                store = stack.enter_context(MooncakeStore(MOONCAKE, held, self.place.logs))
                settings = {"master": store.master}
                if side == THROUGH:
                    settings = self._depot(shape, self._through(store.master, directory))
            environment = MOONCAKE if side == CLIENT else None
            module = f"benches.peers.{'mooncake' if side == CLIENT else 'kvdepot'}_side"
            with Process(module, shape, settings, self.place.logs, environment) as process:
                process.ask("dump", epoch=WARM_UP)
                put = process.ask("dump", epoch=MEASURED)
                process.ask("dump", epoch=AGAIN)
            with Process(module, shape, settings, self.place.logs, environment) as process:
                warm = process.ask("load", epoch=WARM_UP)
                get = process.ask("load", epoch=MEASURED)
            with Process(module, shape, settings, self.place.logs, environment) as process:
                hit = process.ask("hit", epoch=WARM_UP)
                # Mooncake's client has no memory of its own that blocks would be restored to.
                if side != CLIENT:
                    process.ask("restore", epoch=AGAIN)
                    restored = process.ask("restore", epoch=MEASURED)
        sample = {
            "ack_gb_s": gb_s(shape, put["ack_s"]),
            "put_gb_s": gb_s(shape, put["persisted_s"]),
            "get_gb_s": gb_s(shape, get["s"]),
            "hit_us": hit["p50_us"],
        }
        if side != CLIENT:
            sample["restore_gb_s"] = gb_s(shape, restored["s"])
        return Outcome(sample, counted(warm, get, hit))

    def _depot(self, shape: Shape, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"pool_gb": (POOL_EPOCHS * shape.bytes + 64 * MIB) / GIB, **settings}

    def _through(self, master: str, directory: Path) -> dict[str, Any]:
        config = directory / "mooncake.json"
        client = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
            "local_buffer_size": "16mb",
        }
        config.write_text(json.dumps(client))
        return {
            "pipeline": "Cache|Mooncake",
            "mooncake_config_path": str(config),
            "mooncake_python": str(MOONCAKE.python),
        }
