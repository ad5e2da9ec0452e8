"""Options of the network listener: those of InfiniStore's server, by their names and units, and a few of our own."""

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from kvdepot.config.machine import Machine
from kvdepot.config.variables import variable_of
from kvdepot.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

GIB = 1 << 30
KIB = 1 << 10
SERVICE_PORT = 22345
MANAGE_PORT = 18080
HOST = "127.0.0.1"
MEMORY_SHARE_PERCENT = 90
"""Share of the machine's memory that the pool may automatically grow to."""
PORT = click.IntRange(0, 65535)
RDMA = ("dev_name", "ib_port", "link_type", "hint_gid_index")

OPTIONS = (
    click.option("--service-port", type=PORT, help=f"Port of the network listener; default: {SERVICE_PORT}."),
    click.option("--manage-port", type=PORT, help=f"Port of HTTP management; default: {MANAGE_PORT}."),
    click.option("--host", help=f"Address or name to listen on, for both ports; default: {HOST}."),
    click.option(
        "--prealloc-size", type=click.FloatRange(min=0, min_open=True), help="Size of the pool in GB (2^30 bytes)."
    ),
    click.option(
        "--minimal-allocate-size",
        type=click.IntRange(min=16),
        help="Minimum memory of a value, in KB (2^10 bytes); default: 64.",
    ),
    click.option("--auto-increase", is_flag=True, help="Let the pool grow by 10 GB at a time before it evicts."),
    click.option("--enable-periodic-evict", is_flag=True, help="Evict in advance, by the thresholds below."),
    click.option(
        "--evict-interval",
        type=click.FloatRange(min=0, min_open=True),
        default=5.0,
        show_default=True,
        help="Seconds between two checks of the pool.",
    ),
    click.option(
        "--evict-min-threshold",
        type=click.FloatRange(0, 1),
        default=0.6,
        show_default=True,
        help="Share of the pool in use at which eviction stops.",
    ),
    click.option(
        "--evict-max-threshold",
        type=click.FloatRange(0, 1),
        default=0.8,
        show_default=True,
        help="Share of the pool in use at which eviction begins.",
    ),
    click.option("--dev-name", help="RDMA device; this and the next three options enable RDMA in addition to TCP."),
    click.option(
        "--ib-port", type=click.IntRange(1, 255), help="Port of the RDMA device; default: the first that is up."
    ),
    click.option(
        "--link-type", type=click.Choice(["IB", "Ethernet"]), help="Required link type of the port; default: either."
    ),
    click.option(
        "--hint-gid-index",
        type=click.IntRange(-1, 255),
        help="GID index of the port; -1 (default): RoCE v2 over IPv4 if there is one.",
    ),
    click.option(
        "--token-file",
        type=click.Path(dir_okay=False, exists=True),
        envvar="KVDEPOT_TOKEN_FILE",
        help="File with the secret that clients must know; or set KVDEPOT_TOKEN_FILE.",
    ),
    click.option(
        "--tls-certificate-file",
        type=click.Path(dir_okay=False, exists=True),
        help="PEM file with the certificate chain; both ports then accept only TLS.",
    ),
    click.option(
        "--tls-key-file", type=click.Path(dir_okay=False, exists=True), help="PEM file with the certificate's key."
    ),
    click.option("--max-connections", type=click.IntRange(min=1), help="Maximum number of connections; default: 4096."),
)
OPENING = (
    "service_port",
    "manage_port",
    "host",
    "prealloc_size",
    "minimal_allocate_size",
    "auto_increase",
    "enable_periodic_evict",
    "max_connections",
    "tls_certificate_file",
    "tls_key_file",
    *RDMA,
)
"""Options any of which starts the network listener. A token alone does not: it may be set in the environment."""


def options(command: F) -> F:
    """Adds the network listener's options to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def wanted(said: Mapping[str, Any]) -> bool:
    """Returns whether any option requests a network listener."""
    # Port 0 lets the system choose a port; it is equal to False.
    return any(said[name] is not None and said[name] is not False for name in OPENING)


def wanted_by(options: Iterable[str]) -> bool:
    """The same as ``wanted`` for options as a command line spells them."""
    return not {"--" + name.replace("_", "-") for name in OPENING}.isdisjoint(options)


def memory_only(file: str | None, environ: Mapping[str, str]) -> bool:
    """Returns whether a pool server behaves like InfiniStore: in memory, and on disk only on request."""
    return file is None and not environ.get(variable_of("pipeline"))


def wire_json(said: Mapping[str, Any]) -> str:
    """Returns the core's configuration of the network listener.

    Raises:
        ConfigError: a name has no address, or thresholds are in the wrong order.
    """
    low, high = said["evict_min_threshold"], said["evict_max_threshold"]
    if low >= high:
        raise ConfigError(f"--evict-min-threshold {low} must be less than --evict-max-threshold {high}")
    config: dict[str, object] = {
        "host": address(said["host"] or HOST),
        "service_port": SERVICE_PORT if said["service_port"] is None else said["service_port"],
        "manage_port": MANAGE_PORT if said["manage_port"] is None else said["manage_port"],
        "value_bytes_min": (said["minimal_allocate_size"] or 64) * KIB,
        "evict": {
            "periodic": said["enable_periodic_evict"],
            "interval_ms": max(1, int(said["evict_interval"] * 1000)),
            "min_percent": low * 100,
            "max_percent": high * 100,
        },
    }
    if said["token_file"]:
        config["token_file"] = said["token_file"]
    if bool(said["tls_certificate_file"]) != bool(said["tls_key_file"]):
        raise ConfigError("--tls-certificate-file and --tls-key-file go together")
    if said["tls_certificate_file"]:
        config["tls"] = {"certificate_file": said["tls_certificate_file"], "key_file": said["tls_key_file"]}
    if said["max_connections"]:
        config["connections_max"] = said["max_connections"]
    if any(said[name] is not None for name in RDMA):
        config["rdma"] = rdma(said)
    return json.dumps(config)


def rdma(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the core's configuration of RDMA."""
    hint = said["hint_gid_index"]
    return {
        "device": said["dev_name"],
        "port": said["ib_port"],
        "link": said["link_type"],
        "gid_index": None if hint == -1 else hint,
    }


def address(host: str) -> str:
    """Returns an IP address unchanged, or the address of a host name.

    Raises:
        ConfigError: the name has no address.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--host {host}: has no address: {error}") from error


def with_pool(core_json: str, said: Mapping[str, Any], machine: Machine) -> str:
    """Returns the depot's configuration with the pool that the options request.

    Raises:
        ConfigError: the pool is larger than the machine's memory.
    """
    core = json.loads(core_json)
    if said["prealloc_size"] is not None:
        core["pool_bytes"] = int(said["prealloc_size"] * GIB)
        if core["pool_bytes"] > machine.memory_bytes:
            raise ConfigError(
                f"--prealloc-size {said['prealloc_size']:g}: there are {machine.memory_bytes / GIB:.1f} GB of memory"
            )
    if said["auto_increase"]:
        grown_bytes = machine.memory_bytes * MEMORY_SHARE_PERCENT // 100
        core["pool_bytes_max"] = max(core["pool_bytes"], grown_bytes)
        core["pool_grow_bytes"] = 10 * GIB
    return json.dumps(core)
