"""Keys of the ``Remote`` tier: memory pools of other machines."""

from typing import Literal

from pydantic import BaseModel, field_validator

from kvdepot.config.keys import key
from kvdepot.config.placement import PROMOTE, WRITE, WriteWhen

SERVERS_MAX = 64
CONNECTIONS_MAX = 64
TIMEOUT_MS_MAX = 3_600_000
PORT_MAX = 65_535


class RemoteKeys(BaseModel):
    """Pool servers over the wire door."""

    remote_servers: tuple[str, ...] | None = key(
        None,
        "Pool servers of the `Remote` tier, each `host:port`, as a list or separated by `,`: `kvdepot serve` with its "
        "wire door open, or InfiniStore. Each block lives at one of them, so all nodes must spell them alike; "
        "the order does not matter.",
        by_default="none; a pipeline with `Remote` needs at least one",
    )
    remote_token_file: str | None = key(
        None,
        "File with the secret that the pool servers want. With it only servers that prove the same secret are used.",
        by_default="no secret",
    )
    remote_tls_ca_file: str | None = key(
        None,
        "PEM file of the certificates that pool servers are trusted by: their own, or their authority's. "
        "With it they must speak TLS.",
        by_default="no TLS",
    )
    remote_tls_server_name: str | None = key(
        None,
        "Name that the certificates of all pool servers are for.",
        by_default="the host of each in `remote_servers`",
    )
    remote_timeout_ms: int = key(
        2_000,
        "Longest silence of a pool server that owes an answer; then its blocks are misses until it is there again.",
        unit="ms",
        ge=1,
        le=TIMEOUT_MS_MAX,
    )
    remote_connections: int = key(
        4,
        "Connections to each pool server.",
        unit="connections",
        ge=1,
        le=CONNECTIONS_MAX,
    )
    remote_protocol: Literal["auto", "kvdepot", "infinistore"] = key(
        "auto",
        "What the pool servers speak. `auto` finds out; InfiniStore's protocol knows no secret.",
    )
    remote_write: WriteWhen = key("through", WRITE.format(tier="Remote"))
    remote_promote: bool = key(False, PROMOTE.format(tier="Remote"))

    @field_validator("remote_servers", mode="before")
    @classmethod
    def _split_servers(cls, value: object) -> object:
        """``"a:1,b:2"`` and ``["a:1", "b:2"]`` mean the same servers."""
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        return tuple(parts) if isinstance(parts, list) else parts

    @field_validator("remote_servers")
    @classmethod
    def _check_servers(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not 1 <= len(value) <= SERVERS_MAX:
            raise ValueError(f"must name 1 to {SERVERS_MAX} servers")
        for server in value:
            host, _, port = server.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
                raise ValueError(f"{server!r} must be written host:port")
        if len(set(value)) < len(value):
            raise ValueError("names a server twice")
        return value
