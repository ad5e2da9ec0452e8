"""Path where the node's depot listens. Engines with the same configuration compute the same path."""

import hashlib
import os
import stat
from typing import TYPE_CHECKING

from kvdepot.config.core import identity_json
from kvdepot.config.machine import Machine
from kvdepot.config.rules import SOCKET_PATH_BYTES_MAX
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

HEX_DIGITS = 12


def socket_path(config: "KVDepotConfig", block_bytes: int | None, suffix: str | None, machine: Machine) -> str:
    """Returns the depot's socket, and creates its directory if missing.

    Raises:
        ConfigError: an engine's own depot is requested without ``suffix``, or no directory is safely the user's own.
    """
    if config.socket is not None:
        return config.socket
    name = f"depot-{_hex(identity_json(config, block_bytes, machine))}"
    if not config.share_depot:
        if not suffix:
            raise ConfigError("share_depot is false, so every engine has its own socket: name the engine")
        name += f"-{_hex(suffix)}"
    name += ".sock"
    path = os.path.join(runtime_directory(machine), name)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        path = os.path.join(own_directory(_short_directory()), name)
    return path


def runtime_directory(machine: Machine) -> str:
    """Returns the user's own directory for sockets: below ``XDG_RUNTIME_DIR`` if set and writable, else ``/tmp``."""
    base = machine.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK):
        return own_directory(os.path.join(base, "kvdepot"))
    return own_directory(_short_directory())


def runtime_directories(machine: Machine) -> list[str]:
    """Returns the existing directories of this user that may contain sockets."""
    base = machine.environ.get("XDG_RUNTIME_DIR", "")
    places = [os.path.join(base, "kvdepot")] if os.path.isabs(base) else []
    return [path for path in (*places, _short_directory()) if os.path.isdir(path)]


def own_directory(path: str) -> str:
    """Creates ``path`` with mode 0700 if missing, checks that no other user has access to it, and returns it.

    Raises:
        ConfigError: it is not a directory, belongs to another user, or is accessible to others.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        facts = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot make the directory for the depot's socket: {error}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"{path}: must be a directory for the depot's socket, not a link or file: remove it")
    if facts.st_uid != os.getuid():
        raise ConfigError(f"{path}: belongs to user {facts.st_uid}, not to {os.getuid()}: write socket: PATH")
    if facts.st_mode & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        raise ConfigError(f"{path}: has mode {mode:04o}, open to other users: chmod 700 it")
    return path


def _short_directory() -> str:
    return f"/tmp/kvdepot-{os.getuid()}"  # noqa: S108 - own_directory checks who owns it


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]
