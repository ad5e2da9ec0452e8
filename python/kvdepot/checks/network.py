"""Checks of the network: whether pool servers and the bucket's store accept connections."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from kvdepot.checks.finding import Finding
from kvdepot.config import KVDepotConfig

CONNECT_S = 3.0
"""Time limit of one connection, in seconds."""
THREADS_MAX = 64
ENDPOINT_VARIABLES = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_ENDPOINT"}
AZURE_SCHEMES = ("az", "azure", "abfs", "abfss")

Connect = Callable[[str, int], float]


def connect(host: str, port: int) -> float:
    """Returns the seconds until a TCP connection was open. Raises ``OSError`` if none was within the time limit."""
    begun = time.monotonic()
    socket.create_connection((host, port), timeout=CONNECT_S).close()
    return time.monotonic() - begun


@dataclass(frozen=True)
class _Place:
    """What a depot would connect to, and what it means if that fails."""

    check: str
    host: str
    port: int
    why: str
    mend: str


def check_network(
    config: KVDepotConfig, environ: Mapping[str, str] = os.environ, connect: Connect = connect
) -> Iterator[Finding]:
    """Connects to each pool server and to the bucket's store, all at once. Sends nothing."""
    places = [*_servers(config), *_bucket(config, environ)]
    waiting: SimpleQueue[tuple[_Place, Future[Finding]]] = SimpleQueue()
    asked: list[Future[Finding]] = []
    for place in places:
        asked.append(Future())
        waiting.put((place, asked[-1]))

    def ask() -> None:
        with suppress(Empty):
            while True:
                place, answer = waiting.get_nowait()
                try:
                    answer.set_result(_finding(place, connect))
                except Exception as error:  # noqa: BLE001 - raised again by result()
                    answer.set_exception(error)

    # Not those of an executor, for which the process waits at its exit: a name server may hang.
    for _ in range(min(len(places), THREADS_MAX)):
        threading.Thread(target=ask, daemon=True).start()
    for answer in asked:
        yield answer.result()


def _servers(config: KVDepotConfig) -> Iterator[_Place]:
    servers: Sequence[str] = _value(config, "remote_servers") or () if "Remote" in config.tiers else ()
    why = "blocks of a pool server that cannot be reached are misses"
    mend = "start it (kvdepot serve --service-port …); check address, port, --host there, and firewalls between"
    for server in servers:
        host, _, port = server.rpartition(":")
        yield _Place(f"pool server {server}", host.strip("[]"), int(port), why, mend)


def _bucket(config: KVDepotConfig, environ: Mapping[str, str]) -> Iterator[_Place]:
    endpoint = bucket_endpoint(config, environ)
    if endpoint is not None:
        host, port = endpoint
        why = "blocks of a bucket that cannot be reached are misses, and a namespace opens only once it answers"
        mend = "check object_endpoint, DNS and firewalls; a proxy may be needed, through which this check does not go"
        yield _Place(f"bucket at {host}:{port}", host, port, why, mend)


def _finding(place: _Place, connect: Connect) -> Finding:
    try:
        seconds = connect(place.host, place.port)
    except OSError as error:
        return Finding(place.check, "warn", f"no connection: {error.strerror or error}", place.why, place.mend)
    except UnicodeError as error:  # a label of the name is empty or too long
        return Finding(place.check, "warn", f"no name of a host: {error}", place.why, place.mend)
    return Finding(place.check, "ok", f"accepts connections, after {seconds * 1000:.1f} ms", place.why)


def _value(config: KVDepotConfig, name: str) -> Any:
    """Returns a tier's key; the core's table defines those."""
    return getattr(config, name)


def bucket_endpoint(config: KVDepotConfig, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns host and port of the bucket's store; ``None`` without one, or if only credentials name the account."""
    if "Object" not in config.tiers:
        return None
    scheme, _, rest = str(_value(config, "object_url")).partition("://")
    name = rest.partition("/")[0]
    cloud = "az" if scheme in AZURE_SCHEMES else scheme
    written = _value(config, "object_endpoint") or environ.get(ENDPOINT_VARIABLES[cloud])
    if written is None and cloud == "s3":
        region = (
            _value(config, "object_region")
            or environ.get("AWS_REGION")
            or environ.get("AWS_DEFAULT_REGION")
            or "us-east-1"
        )
        written = f"https://s3.{region}.amazonaws.com"
    elif written is None and cloud == "gs":
        written = "https://storage.googleapis.com"
    elif written is None and "@" in name:
        written = "https://" + name.partition("@")[2].replace(".dfs.", ".blob.")
    elif written is None and environ.get("AZURE_STORAGE_ACCOUNT"):
        written = f"https://{environ['AZURE_STORAGE_ACCOUNT']}.blob.core.windows.net"
    if written is None:
        return None
    split = urlsplit(written if "://" in written else f"http://{written}")
    try:
        port = split.port or (443 if split.scheme == "https" else 80)
    except ValueError:
        return None
    return None if split.hostname is None else (split.hostname, port)
