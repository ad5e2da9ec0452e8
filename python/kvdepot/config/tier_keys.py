"""Keys of the tiers, generated from the core's table: their types, checks and documentation."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, create_model
from pydantic_core import PydanticCustomError

from kvdepot.config.keys import home, key
from kvdepot.config.placement import placement_keys
from kvdepot.config.sizes import GIB
from kvdepot.config.tier_table import TIERS, Kind, Tier, TierKey, TierSetting

PORT_MAX = 65_535


def keys_of(tier: Tier) -> dict[str, Any]:
    """Returns a tier's keys as fields of a model, in the order of the documentation: its own, then its placement's."""
    if not tier.for_users:
        return {}
    own = {row.name: (_annotation(setting), _field(setting, row)) for setting, row in tier.keyed}
    return own | placement_keys(tier)


def names_of(tier: Tier) -> tuple[str, ...]:
    """Returns the names of a tier's keys."""
    return tuple(keys_of(tier))


def _annotation(setting: TierSetting) -> Any:
    kind = setting.kind
    types: dict[str, Any] = {
        "bool": bool,
        "switch": Literal[True, False, "auto"],
        "whole": int,
        "bytes": float,
        "choice": Literal[kind.of],
        "text": str,
        "path": str,
        "url": str,
        "paths": tuple[str, ...],
        "servers": tuple[str, ...],
    }
    wanted = types[kind.is_]
    if setting.key is not None and setting.key.default is None:
        wanted = wanted | None
    if kind.is_ == "path":
        return Annotated[wanted, BeforeValidator(home), AfterValidator(_checked(_path_problems))]
    if kind.is_ == "url":
        return Annotated[wanted, AfterValidator(_checked(_url_problems(kind)))]
    if kind.is_ == "paths":
        return Annotated[wanted, BeforeValidator(_split_paths), AfterValidator(_checked(_paths_problems(kind)))]
    if kind.is_ == "servers":
        return Annotated[wanted, BeforeValidator(_split_servers), AfterValidator(_checked(_servers_problems(kind)))]
    return wanted


def _field(setting: TierSetting, made: TierKey) -> Any:
    kind = setting.kind
    bounds: dict[str, float] = {}
    if kind.is_ == "whole":
        bounds = {"ge": kind.min, "le": kind.max}
    if kind.is_ == "bytes":
        bounds = {"ge": 0, "le": kind.max / GIB}
    return key(
        made.default,
        made.meaning,
        unit=made.unit,
        seeds=made.seeds,
        half_of_seed=made.half_of_seed,
        by_default=made.by_default,
        only=made.only,
        instead=made.instead,
        type_text={"paths": "list of paths", "servers": "list of host:port"}.get(kind.is_, ""),
        **bounds,
    )


def _split_paths(value: object) -> object:
    """Splits ``"/a:/b"`` into the same paths as ``["/a", "/b"]``; ``~`` is the user's home."""
    parts = value.split(":") if isinstance(value, str) else value
    return tuple(map(home, parts)) if isinstance(parts, list) else parts


def _split_servers(value: object) -> object:
    """Splits ``"a:1,b:2"`` into the same servers as ``["a:1", "b:2"]``."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) else parts


def _checked(problems: Callable[[Any], Sequence[str]]) -> Callable[[Any], Any]:
    """Returns a validator that reports all problems of a value together; ``None`` always passes."""

    def check(value: Any) -> Any:
        found = problems(value) if value is not None else []
        if found:
            raise PydanticCustomError("value", "{text}", {"text": "; ".join(found)})
        return value

    return check


def _path_problems(path: str) -> Sequence[str]:
    return [] if os.path.isabs(path) else ["must be an absolute path, because the depot is its own process"]


def _url_problems(kind: Kind) -> Callable[[str], Sequence[str]]:
    def problems(url: str) -> Sequence[str]:
        scheme, _, rest = url.partition("://")
        name, at, host = rest.partition("@")
        if at and scheme in kind.with_name and name and not set(":/") & set(name):
            rest = host
        plain = "@" not in rest and all("!" <= char <= "~" and char not in "?#" for char in url)
        if scheme in kind.of and rest and plain and not rest.startswith("/"):
            return []
        wanted = " or ".join(f"{scheme}://" for scheme in kind.of)
        return [f"must be a URL that begins with {wanted} and holds no user, query or fragment"]

    return problems


def _paths_problems(kind: Kind) -> Callable[[tuple[str, ...]], Sequence[str]]:
    def problems(paths: tuple[str, ...]) -> Sequence[str]:
        found = [f"{path!r} {text}" for path in paths for text in _path_problems(path)]
        if not 1 <= len(paths) <= kind.max:
            found.append(f"must be 1 to {kind.max} directories")
        if len(set(paths)) < len(paths):
            found.append("a directory is listed twice: name each once")
        return found

    return problems


def _servers_problems(kind: Kind) -> Callable[[tuple[str, ...]], Sequence[str]]:
    def problems(servers: tuple[str, ...]) -> Sequence[str]:
        found = [f"{server!r} must be written host:port" for server in servers if not _is_address(server)]
        if not 1 <= len(servers) <= kind.max:
            found.append(f"must name 1 to {kind.max} servers")
        if len(set(servers)) < len(servers):
            found.append("names a server twice")
        return found

    return problems


def _is_address(server: str) -> bool:
    host, _, port = server.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 1 <= int(port) <= PORT_MAX


if TYPE_CHECKING:

    class TierKeys(BaseModel):
        """Keys of all tiers; the actual ones are known when the core is loaded."""

else:
    TierKeys = create_model(
        "TierKeys", __doc__="Keys of all tiers.", **{name: row for tier in TIERS for name, row in keys_of(tier).items()}
    )
