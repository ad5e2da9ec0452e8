"""The attachment to the node's depot, and the current namespace.

A lookup, dump or load that fails is not an error: it is a miss, and counted.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvdepot.config import KVDepotConfig
from kvdepot.engines.attachment import attach
from kvdepot.engines.counters import Counters
from kvdepot.engines.vllm.presence import Place, Presence, taken_sizes
from kvdepot.errors import BusyError, is_failure

TASK_S = 10.0
"""Time limit of a dump or load in seconds, unless ``timeout_ms`` is shorter."""
RESET_S = 5.0
"""Seconds that vLLM's scheduler waits for the depot to reset a namespace, retries of a busy depot included."""
BUSY_AGAIN_S = 0.05

_Result = TypeVar("_Result")

Verb: TypeAlias = Literal["dump", "load"]
Connect: TypeAlias = Callable[[KVDepotConfig, str], Any]


class Room:
    """Looks up, dumps and loads chunks by their addresses. Only ``lookup`` may be called from other threads."""

    def __init__(
        self,
        config: KVDepotConfig,
        facts: Mapping[str, object],
        chunk_bytes: int,
        counters: Counters,
        connect: Connect | None = None,
        suffix: str = "",
    ) -> None:
        """Attaches to the node's depot, and starts one if none answers.

        Args:
            config: configuration of depot and client.
            facts: description of the namespace.
            chunk_bytes: size of a chunk.
            counters: counters for results and failures.
            connect: attaches as the engine with an ID; ``None`` = the default.
            suffix: engine ID, for depots that are not shared.

        Raises:
            ConfigError: the pool that would be started does not fit the machine, or the facts are wrong.
            ProtocolError: something else, or another version, answers on the socket.
        """
        self._config = config
        self._facts = dict(facts)
        self._off = ""
        self._apart = False
        self._reset: threading.Thread | None = None
        self._chunk_bytes = chunk_bytes
        self._counters = counters
        self.task_s = min(config.timeout_ms / 1e3, TASK_S)
        socket = config.socket_path(suffix=suffix)
        self._depot = (connect or attach)(config, suffix)
        self._presence = Presence(self._depot, Place.of(config, socket))
        self._presence.begin(taken_sizes(config))
        self._store = self._open(self._facts)

    @property
    def attached(self) -> bool:
        """Whether calls reach a depot now."""
        return not self._off and bool(self._depot.attached)

    @property
    def trouble(self) -> str:
        """Why no depot is attached."""
        return self._off or str(self._depot.trouble or "none has answered yet")

    @property
    def namespace_id(self) -> str:
        """The namespace's ID, 32 hex digits, as in ``kvdepot ls``."""
        return str(self._store.namespace.id)

    def look(self) -> None:
        """Logs that the depot was lost or is back. Called between steps."""
        self._presence.look()

    def lookup(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_] | None:
        """Returns which chunks the depot has, or ``None`` if there is no answer. May wait for tiers.

        A lookup that an attached depot refuses looks like one that finds nothing: the core does not distinguish them.
        """
        try:
            self._counters.add("lookups")
            found = np.asarray(self._store.lookup(keys), dtype=bool)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._counters.trouble("miss_error", f"a lookup failed: {error!r}", len(keys))
            return None
        if not found.any() and not self.attached:
            self._counters.trouble("miss_no_depot", f"no depot answers: {self.trouble}", len(keys))
            return None
        self._counters.add("asked", len(keys))
        self._counters.add("hit", int(found.sum()))
        return found

    def move(self, verb: Verb, keys: Sequence[bytes], addresses: npt.NDArray[np.uint64]) -> Any:
        """Starts to dump or load chunks. Returns the task, or ``None`` if it was refused."""
        if not self.attached:
            self._counters.trouble(f"{verb}_no_depot", f"no depot answers: {self.trouble}", len(keys))
            return None
        try:
            return getattr(self._store, verb)(keys, addresses.reshape(-1, 1))
        except BaseException as error:
            if not is_failure(error):
                raise
            self._counters.trouble(f"{verb}_error", f"a {verb} failed: {error!r}", len(keys))
            return None

    def go_apart(self) -> bool:
        """Switches to an empty namespace with a unique name. No task may be running.

        If this room already has such a namespace, the depot resets it, because the number of namespaces is limited and
        an engine may be reset after every training step. If that fails, the room switches to another new namespace.
        Calls to a busy depot are retried for ``RESET_S``.

        Returns:
            Whether that worked. If not, everything is a miss from now on.
        """
        before = self._store
        try:
            if self._apart and self._emptied():
                return True
            facts = {**self._facts, "weights_version": f"after a reset {uuid.uuid4().hex}"}
            self._store = _patiently(lambda: self._open(facts))
            before.close(0)
            self._leave(before.namespace)
            self._apart = True
        except BaseException as error:
            if not is_failure(error):
                raise
            # Nothing that was stored before may be found.
            self._off = f"no namespace could be opened after a reset: {error!r}"
            self._counters.trouble("miss_off", f"off until the next start: {self._off}")
            return False
        return True

    def close(self) -> None:
        """Detaches. No task may be running. Idempotent."""
        self._store.close(0)
        self._depot.close()

    def _leave(self, namespace: Any) -> None:
        """Closes a namespace, after its reset has ended if one is under way."""
        reset = self._reset

        def close() -> None:
            if reset is not None:
                reset.join()
            namespace.close()

        if reset is None or not reset.is_alive():
            close()
        else:
            threading.Thread(target=close, name="kvdepot-leave", daemon=True).start()

    def _emptied(self) -> bool:
        """Returns whether the depot has reset the current namespace within ``RESET_S``."""
        namespace, done = self._store.namespace, threading.Event()

        def reset() -> None:
            try:
                _patiently(lambda: self._depot.reset([namespace]))
                done.set()
            except BaseException as error:
                if not is_failure(error):
                    raise
                self._counters.trouble("errors", f"the depot did not reset a namespace: {error!r}")

        # The call itself may take timeout_ms. If it succeeds too late, the namespace is not used any more.
        self._reset = threading.Thread(target=reset, name="kvdepot-reset", daemon=True)
        self._reset.start()
        self._reset.join(RESET_S)
        return done.is_set()

    def _open(self, facts: Mapping[str, object]) -> Any:
        # The store does not close it: a reset of it may be under way then.
        namespace = self._depot.open_namespace(facts, layout=[self._chunk_bytes])
        return self._depot.open(namespace=namespace, timeout_ms=int(self.task_s * 1e3))


def _patiently(call: Callable[[], _Result]) -> _Result:
    """Returns what ``call`` returns. A ``BusyError`` is momentary: the call is repeated for ``RESET_S``."""
    end_s = time.monotonic() + RESET_S
    while True:
        try:
            return call()
        except BusyError:  # noqa: PERF203 - each round waits
            if time.monotonic() >= end_s:
                raise
            time.sleep(BUSY_AGAIN_S)
