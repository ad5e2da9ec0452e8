"""A depot with a status page, a small pool above a disk and a bucket, and work for it."""

import json
import random
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

import kvdepot
from tools.lab.bucket import Bucket
from tools.lab.depot import Depot, DepotHome
from tools.lab.ports import LOOPBACK, free_port

BLOCK_BYTES = 1 << 20
POOL_BLOCKS = 64
PATIENCE_S = 100.0
ANSWER_S = 30.0
# A busy machine must not reach them.
TASK_MS, CALL_MS, OBJECT_MS = 60_000, 30_000, 60_000
AT_ONCE = 16
TURN_S = 0.2
TURN_BLOCKS = 8


class Site:
    """A depot that is watched; it ends with the ``with`` block.

    Attributes:
        home: its files.
        port: of its status page.
        service_port: of its network listener; None if it has none.
        depot: its process, once it was started.
    """

    def __init__(self, root: Path, bucket: Bucket | None = None, *, serves: bool = False, **values: Any) -> None:
        """Prepares it, with a network listener if it ``serves``; ``values`` are further keys of its configuration."""
        self.port = free_port()
        self.service_port = free_port() if serves else None
        pipeline = "Cache|Posix|Object" if bucket else "Cache|Posix"
        in_bucket = {**bucket.options(), "object_timeout_ms": OBJECT_MS} if bucket else {}
        options = {"posix_capacity_gb": 0.5, "timeout_ms": TASK_MS, **in_bucket}
        pool_gb = POOL_BLOCKS * BLOCK_BYTES / (1 << 30)
        whole = {"pipeline": pipeline, "pool_gb": pool_gb, "metrics_port": self.port, **options, **values}
        self.home = DepotHome(root, whole)
        self._values = whole
        self.depot: Depot | None = None

    @property
    def url(self) -> str:
        """The status page."""
        return f"http://{LOOPBACK}:{self.port}/"

    @property
    def process(self) -> Depot:
        """The process; it was started."""
        assert self.depot is not None
        return self.depot

    def start(self, **values: Any) -> Depot:
        """Starts the depot on the blocks of the one before; ``values`` are other keys of its configuration."""
        self._values |= values
        self.home.configure(self._values)
        self.depot = self.home.start(*self._options())
        return self.depot

    def _options(self) -> list[str]:
        if self.service_port is None:
            return []
        # The default port of its HTTP management may be another depot's.
        return ["--service-port", str(self.service_port), "--manage-port", "0"]

    def page(self, name: str) -> Any:
        """Returns the JSON of a page, such as ``status``."""
        with urllib.request.urlopen(self.url + name, timeout=ANSWER_S) as answer:
            return json.load(answer)

    def engine(self, facts: Mapping[str, Any]) -> "Engine":
        """Returns a client that has a namespace of its own."""
        at = {"mode": "node", "socket": str(self.home.socket), "start_depot": False, "attach_timeout_ms": 60_000}
        return Engine({**at, "call_timeout_ms": CALL_MS}, facts)

    def guest(self, facts: Mapping[str, Any]) -> "Engine":
        """Returns a client of another depot, in this process, whose tier is the network listener."""
        pool_gb = POOL_BLOCKS * BLOCK_BYTES / (1 << 30)
        remote = {"pipeline": "Cache|Remote", "remote_servers": [f"{LOOPBACK}:{self.service_port}"]}
        return Engine({"mode": "embedded", "pool_gb": pool_gb, **remote}, facts)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.depot is not None:
            self.depot.kill()
        self.home.remove()


class Engine:
    """A client of a depot, with blocks that are known by their numbers. It closes with the ``with`` block."""

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._depot = kvdepot.attach({"timeout_ms": TASK_MS, "log_level": "error", **config})
        self._store = self._depot.open(layout=[BLOCK_BYTES], namespace=facts)

    @property
    def namespace(self) -> str:
        """Name of its namespace."""
        return self._store.namespace_id

    def dump(self, numbers: range) -> None:
        """Stores blocks, and waits until the tiers have them."""
        # A pool that is full of blocks that no tier has yet refuses others.
        for at in range(numbers.start, numbers.stop, AT_ONCE):
            some = range(at, min(at + AT_ONCE, numbers.stop))
            rows = [[np.full(BLOCK_BYTES, number % 251, np.uint8)] for number in some]
            self._store.dump(self._hashes(some), rows).wait().raise_for_failures()
            assert self._store.drain(int(PATIENCE_S * 1000)), "the tiers have everything"

    def load(self, numbers: range) -> int:
        """Returns how many of the blocks came."""
        rows = [[np.zeros(BLOCK_BYTES, np.uint8)] for _ in numbers]
        return len(numbers) - len(self._store.load(self._hashes(numbers), rows).wait().failed)

    def find(self, numbers: range) -> int:
        """Returns how many of the first blocks a lookup finds."""
        return self._store.lookup_on_prefix(self._hashes(numbers))

    def claim(self, numbers: range) -> int:
        """Claims the first blocks, as an engine's scheduler does, and lets go of them. Returns how many there were."""
        with self._depot.claim([self._store], self._hashes(numbers)) as claim:
            return claim.wait(TASK_MS).units

    @staticmethod
    def _hashes(numbers: range) -> list[bytes]:
        return [number.to_bytes(16, "big") for number in numbers]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()
        self._depot.close()


class Traffic(threading.Thread):
    """Requests of an engine, and of a guest if there is one, one after another until the ``with`` block ends.

    Each turn stores some new blocks, claims and loads some that were stored long ago, and asks for more than there is.
    How many they are differs from turn to turn. The guest stores a block.
    """

    def __init__(self, engine: Engine, guest: Engine | None = None) -> None:
        super().__init__(name="traffic")
        self._engine = engine
        self._guest = guest
        self._enough = threading.Event()
        self._error: Exception | None = None
        self._dice = random.Random(0)

    def run(self) -> None:
        """Works until it is told that it is enough."""
        try:
            for turn in range(1 << 30):
                self._turn(turn)
                if self._enough.wait(TURN_S):
                    return
        except Exception as error:  # noqa: BLE001 - raised where the thread is joined
            self._error = error

    def _turn(self, turn: int) -> None:
        first, count = 1000 + turn * TURN_BLOCKS, self._dice.randint(2, TURN_BLOCKS)
        self._engine.dump(range(first, first + count))
        # These were all stored, and some left the pool since.
        old = 1000 + max(0, turn - 2 * POOL_BLOCKS // TURN_BLOCKS) * TURN_BLOCKS
        again = range(old, old + self._dice.randint(1, 2))
        self._engine.find(again)
        self._engine.claim(again)
        self._engine.load(again)
        if self._guest:
            self._guest.dump(range(turn, turn + 1))
        self._engine.find(range(first, first + count + self._dice.randint(0, 3)))

    def __enter__(self) -> Self:
        self.start()
        return self

    def stop(self) -> None:
        """Ends it, and waits for its last request."""
        self._enough.set()
        self.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._error is not None and error is None:
            raise self._error
