"""Process between a depot and Mooncake Store: it owns Mooncake's client, which a depot cannot link.

The depot starts it with a socket as standard input and sends this source, then the setup with the descriptor of the
staging memory, then requests. Frames are a length (u32, little-endian) and a JSON object. A request names keys,
offsets and sizes in the staging memory; no block's bytes pass through Python. Each request runs on a thread, so
answers come in any order, and a call that hangs delays no other. The process ends with its socket or its parent.
"""

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROTOCOL = 1
LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 1 << 20
CONNECT_TIMEOUT_S = 5
PR_SET_PDEATHSIG = 1
SIGKILL = 9


class Peer:
    """The depot's end of the conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.sending = threading.Lock()

    def receive(self) -> "tuple[dict[str, Any], list[int]] | None":
        """Returns the next frame with its descriptors; ``None`` when the depot has closed the connection."""
        descriptors: list[int] = []
        head = b""
        while len(head) < LENGTH.size:
            some, fds, _, _ = socket.recv_fds(self.connection, LENGTH.size - len(head), 1)
            descriptors += fds
            if not some:
                return None
            head += some
        (count,) = LENGTH.unpack(head)
        if count > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {count} bytes exceeds {FRAME_BYTES_MAX}")
        body = bytearray()
        while len(body) < count:
            some = self.connection.recv(count - len(body))
            if not some:
                return None
            body += some
        frame = json.loads(body)
        return frame, descriptors

    def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame."""
        body = json.dumps(frame, separators=(",", ":")).encode()
        with self.sending:
            self.connection.sendall(LENGTH.pack(len(body)) + body)


def ensure_master(address: str) -> None:
    """Fails if nothing listens at the master's address. Mooncake itself would try for a minute and a half."""
    host, colon, port = address.rpartition(":")
    # With a directory of masters (``etcd://…``), Mooncake chooses.
    if "://" in address or not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeError(f"no Mooncake master answers at {address} (master_server_address): {error}") from error


def open_store(config_path: "str | None") -> "tuple[Any, str]":
    """Connects as Mooncake's own configuration says: a JSON file, else ``MOONCAKE_*``. Returns store and master."""
    from mooncake.mooncake_config import MooncakeConfig
    from mooncake.store import MooncakeDistributedStore

    config = MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
    more: dict[str, Any] = {}
    # Releases of Mooncake differ in these: what is off is not passed.
    if getattr(config, "enable_ssd_offload", False):
        more |= {"enable_ssd_offload": True, "ssd_offload_path": config.ssd_offload_path}
    if getattr(config, "tenant_id", "default") != "default":
        more["tenant_id"] = config.tenant_id
    if getattr(config, "enable_client_http_server", False):
        more |= {"enable_client_http_server": True, "client_http_port": config.client_http_port}
    ensure_master(config.master_server_address)
    store = MooncakeDistributedStore()
    code = store.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_size,
        config.local_buffer_size,
        config.protocol,
        config.device_name or "",
        config.master_server_address,
        **more,
    )
    if code != 0:
        raise RuntimeError(
            f"Mooncake's setup failed with {code}: is the master at {config.master_server_address} up, and "
            f"{config.metadata_server.rpartition('@')[2]} reachable?"
        )
    return store, config.master_server_address


class Calls:
    """The requests, as calls of Mooncake's client."""

    def __init__(self, store: Any, memory: mmap.mmap, replicas: int) -> None:
        from mooncake.store import ReplicateConfig

        missing = [name for name in ("batch_upsert_from", "batch_remove") if not hasattr(store, name)]
        if missing:
            raise RuntimeError(f"this release of Mooncake is too old: its client has no {', '.join(missing)}")
        self.store = store
        self.bytes = len(memory)
        # It keeps the memory mapped.
        self.first = ctypes.c_char.from_buffer(memory)
        self.base = ctypes.addressof(self.first)
        self.blocks = ReplicateConfig()
        self.blocks.replica_num = replicas
        # A lost record of an epoch costs all blocks of its namespace: it is not evicted, and has a second replica.
        self.records = ReplicateConfig()
        self.records.replica_num = max(replicas, 2)
        if hasattr(self.records, "with_hard_pin"):
            self.records.with_hard_pin = True
        code = store.register_buffer(self.base, self.bytes)
        if code != 0:
            raise RuntimeError(f"Mooncake cannot register {self.bytes} bytes of staging memory: {code}")
        self.by_name: dict[str, Callable[[dict[str, Any]], list[int]]] = {
            "put": self.put,
            "get": self.get,
            "exists": self.exists,
            "remove": self.remove,
            "put_record": self.put_record,
            "replace_record": self.replace_record,
        }

    def pointers(self, request: dict[str, Any]) -> list[int]:
        """Returns addresses in the staging memory."""
        for at, size in zip(request["at"], request["bytes"], strict=True):
            if at < 0 or size <= 0 or at + size > self.bytes:
                raise ValueError(f"{size} bytes from {at} on are not in the staging memory of {self.bytes}")
        return [self.base + at for at in request["at"]]

    def put(self, request: dict[str, Any]) -> list[int]:
        """Stores values: 0 for each that was stored now, 1 for each that was there."""
        keys, pointers, sizes = request["keys"], self.pointers(request), request["bytes"]
        # Mooncake's own put of a key that is there succeeds and says nothing of it.
        codes = [1 if code == 1 else 0 for code in self.store.batch_is_exist(keys)]
        new = [index for index, code in enumerate(codes) if code == 0]
        if new:
            stored = self.store.batch_put_from(
                [keys[index] for index in new],
                [pointers[index] for index in new],
                [sizes[index] for index in new],
                self.blocks,
            )
            for index, code in zip(new, stored, strict=True):
                codes[index] = min(int(code), 0)
        return codes

    def get(self, request: dict[str, Any]) -> list[int]:
        """Reads values: the number of bytes of each."""
        codes = self.store.batch_get_into(request["keys"], self.pointers(request), request["bytes"])
        return [int(code) for code in codes]

    def exists(self, request: dict[str, Any]) -> list[int]:
        """Tells for each key whether it is there: 1 or 0."""
        return [int(code) for code in self.store.batch_is_exist(request["keys"])]

    def remove(self, request: dict[str, Any]) -> list[int]:
        """Removes values. Those that a reader has a lease on stay: -706."""
        return [int(code) for code in self.store.batch_remove(request["keys"])]

    def put_record(self, request: dict[str, Any]) -> list[int]:
        """Stores records unless there are any."""
        pointers = self.pointers(request)
        return [
            int(code) for code in self.store.batch_put_from(request["keys"], pointers, request["bytes"], self.records)
        ]

    def replace_record(self, request: dict[str, Any]) -> list[int]:
        """Stores records, in place of any that are there."""
        pointers = self.pointers(request)
        return [
            int(code)
            for code in self.store.batch_upsert_from(request["keys"], pointers, request["bytes"], self.records)
        ]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs a request."""
        try:
            codes = self.by_name[request["op"]](request)
        except Exception as error:  # noqa: BLE001 - whatever Mooncake raises is an answer
            return {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        return {"id": request["id"], "codes": codes}


def version() -> str:
    """Returns the version of the installed package of Mooncake."""
    from importlib import metadata

    names = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
    found = [one.version for name in names for one in metadata.distributions(name=name)]
    return found[0] if found else "unknown"


def begin(setup: dict[str, Any], descriptors: list[int]) -> tuple[str, Calls]:
    """Maps the memory and connects. Returns the master's address, and the calls."""
    if setup["protocol"] != PROTOCOL or len(descriptors) != 1:
        raise ValueError(f"protocol {setup['protocol']} with {len(descriptors)} descriptors, not {PROTOCOL} with 1")
    memory = mmap.mmap(descriptors[0], setup["bytes"])
    store, master = open_store(setup["config_path"])
    return master, Calls(store, memory, setup["replicas"])


def main() -> None:
    """Serves one depot."""
    # Also if the depot is killed while a call of Mooncake holds the interpreter's lock.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    peer = Peer(socket.socket(fileno=os.dup(0)))
    first = peer.receive()
    if first is None:
        return
    setup, descriptors = first
    try:
        master, calls = begin(setup, descriptors)
    except Exception as error:  # noqa: BLE001 - whatever Mooncake raises is told to the depot
        peer.send({"id": 0, "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    peer.send({"id": 0, "codes": [], "master": master, "version": version()})
    threads = ThreadPoolExecutor(setup["threads"], thread_name_prefix="mooncake")
    while True:
        frame = peer.receive()
        if frame is None:
            # Without Mooncake's own end, which may hang: the master finds out by the client's silence.
            os._exit(0)
        threads.submit(serve, peer, calls, frame[0])


def serve(peer: Peer, calls: Calls, request: dict[str, Any]) -> None:
    """Runs a request and answers it."""
    try:
        peer.send(calls.answer(request))
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError) as problem:
        print(f"the helper of the Mooncake tier ends: {problem}", file=sys.stderr)
        os._exit(1)
