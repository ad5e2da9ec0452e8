"""A depot as a separate process, over a directory that outlives it."""

import errno
import json
import shutil
import socket as sockets
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import Self

from kvdepot import _native
from tools.lab.child import POLL_S, Child, ChildError

START_S = 60.0
CALL_MS = 1000
ANSWER_S = 60.0
CLEAN_POLLS = 3
DUMP_POLL_S = 0.01
UNSAVED = ("pool_filling_bytes", "pool_dirty_bytes", "writes_queued")


class DepotHome:
    """A depot's configuration, socket, log and block files, which outlive the depot itself."""

    def __init__(self, root: Path, values: Mapping[str, Any]) -> None:
        """Creates an empty home; anything that an earlier run left in ``root`` is removed."""
        self.root = root
        self.blocks = root / "blocks"
        self.config = root / "kvdepot.yaml"
        shutil.rmtree(self.blocks, ignore_errors=True)
        self.blocks.mkdir(parents=True)
        # A socket's path must be short, but the repository's may be long.
        self._runtime = Path(tempfile.mkdtemp(prefix="kvdepot-"))
        self.socket = self._runtime / "depot.sock"
        self.configure(values)

    def configure(self, values: Mapping[str, Any]) -> None:
        """Writes the configuration for the next depot; a value of None leaves its key out."""
        whole = {"pipeline": "Cache|Posix", "socket": str(self.socket), "directories": [str(self.blocks)], **values}
        whole = {name: value for name, value in whole.items() if value is not None}
        self.config.write_text(yaml.safe_dump(whole, sort_keys=False))

    def start(self, *options: str) -> "Depot":
        """Starts a depot with these options of ``kvdepot serve``, and waits until it answers."""
        return Depot(self, *options)

    def files(self) -> list[Path]:
        """Returns all block files."""
        return [path for path in self.blocks.rglob("*") if path.is_file()]

    def __enter__(self) -> Self:
        """Returns the home, which is removed on exit."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes it."""
        self.remove()

    def remove(self) -> None:
        """Removes the socket's directory; configuration, log and blocks stay for inspection."""
        shutil.rmtree(self._runtime, ignore_errors=True)


class Depot(Child):
    """A running depot."""

    def __init__(self, home: DepotHome, *options: str) -> None:
        command: list[str | Path] = [sys.executable, "-m", "kvdepot", "serve", "--config", home.config, *options]
        super().__init__("the depot", command, home.root / "depot.log", {})
        self._home = home
        self.wait_until_ready(lambda: self.stats() is not None, START_S)

    def stats(self) -> dict[str, Any] | None:
        """Returns the depot's own statistics; None if it does not answer."""
        return depot_stats(self._home.socket)

    def wait_until_clean(self, timeout_s: float) -> None:
        """The same as the function; the message has the end of the log.

        Raises:
            ChildError: the depot ended, or the time passed first.
        """
        try:
            wait_until_clean(self._home.socket, timeout_s)
        except TimeoutError as error:
            self.check()
            raise ChildError(f"{error}\n{self.tail()}") from error


def depot_stats(socket: Path) -> dict[str, Any] | None:
    """Returns counters and gauges of the depot that answers there; None if none does.

    A busy machine may not run a depot for as long as one question lasts: it is asked again while it listens.
    """
    end_s = time.monotonic() + ANSWER_S
    while (found := _asked_once(socket)) is None and _listens(socket) and time.monotonic() < end_s:
        pass
    return found


def _listens(socket: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX) as one:
        one.settimeout(CALL_MS / 1000)
        try:
            return one.connect_ex(str(socket)) not in (errno.ENOENT, errno.ECONNREFUSED)
        except OSError:  # a path that is too long
            return False


def _asked_once(socket: Path) -> dict[str, Any] | None:
    depot = _native.Depot.connect(str(socket), None, wait_ms=CALL_MS, call_timeout_ms=CALL_MS)
    try:
        found: dict[str, Any] | None = json.loads(depot.stats_json()).get("depot")
        return found
    finally:
        depot.close()


def wait_until_clean(socket: Path, timeout_s: float) -> None:
    """Waits until everything dumped is in the tiers, so that nothing is lost if the depot is killed afterwards.

    Raises:
        TimeoutError: the time passed first.
    """
    end_s = time.monotonic() + timeout_s
    seen_clean = 0
    # Polled repeatedly: an engine's last dump may still be in flight to the depot.
    while seen_clean < CLEAN_POLLS:
        stats = depot_stats(socket)
        unsaved = {name: stats[name] for name in UNSAVED} if stats is not None else None
        seen_clean = seen_clean + 1 if unsaved is not None and not any(unsaved.values()) else 0
        if time.monotonic() > end_s:
            raise TimeoutError(f"the depot is not clean after {timeout_s:.0f} s: {unsaved or 'it does not answer'}")
        time.sleep(POLL_S)


def let_dumps_end(socket: Path, timeout_s: float) -> None:
    """Waits until no block is being dumped, if a depot answers: an engine returns before its last dumps have ended.

    Returns after ``timeout_s`` at the latest.
    """
    end_s = time.monotonic() + timeout_s
    seen_still = 0
    while seen_still < CLEAN_POLLS and time.monotonic() < end_s:
        stats = depot_stats(socket)
        if stats is None:
            return
        seen_still = 0 if stats.get("pool_filling_bytes") else seen_still + 1
        time.sleep(DUMP_POLL_S)
