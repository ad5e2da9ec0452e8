"""Which weights a model of LMCache's has: LMCache passes the model's name or path, and nothing else about it."""

import concurrent.futures
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvdepot.engines.lmcache.counters import lmcache_logger
from kvdepot.engines.weights import config_file_digest, model_digest
from kvdepot.errors import ConfigError, UnavailableError, is_failure

DECORATION = "##"
"""LMCache appends this and a word to the name for objects that are not plain KV, and for KV that is cut differently."""


@dataclass(frozen=True)
class _Reading:
    end_s: float
    found: "Future[dict[str, object]]" = field(default_factory=Future)


class Weights:
    """Identifies the weights of models by their files on this machine, once for each model.

    The files are read in the background, because a file system may hang: until they are read, callers fail. Any number
    of threads may use it concurrently.
    """

    def __init__(self, weights_version: str, wait_s: float) -> None:
        """Reads nothing yet.

        Args:
            weights_version: the user's name for the weights; empty if there is none.
            wait_s: seconds that callers wait in all for the files of one model.
        """
        self._version = weights_version
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._readings: dict[str, _Reading] = {}

    def facts(self, model: str) -> dict[str, object]:
        """Returns digests of a model's weight files and of its ``config.json``; only those that exist.

        If nothing identifies the weights, the log says so, once for each model.

        Raises:
            UnavailableError: the files are still being read.
            ConfigError: the files cannot be read, and no ``weights_version`` names the weights.
        """
        with self._lock:
            reading = self._readings.get(model)
            if reading is None:
                reading = self._readings[model] = _Reading(time.monotonic() + self._wait_s)
                threading.Thread(target=self._read, args=(model, reading), name="kvdepot-weights", daemon=True).start()
        concurrent.futures.wait([reading.found], max(0.0, reading.end_s - time.monotonic()))
        if not reading.found.done():
            raise UnavailableError(f"the weight files of {model} are still being read")
        try:
            return reading.found.result()
        except BaseException as error:  # an unreadable file, or one that is something else
            if not is_failure(error):
                raise
            if self._version:
                return {}
            with self._lock:
                # The next caller tries again.
                if self._readings.get(model) is reading:
                    del self._readings[model]
            raise ConfigError(
                f"the weight files of {model} cannot be read, so its KV cannot be distinguished from that of other "
                f"weights: make them readable, or set weights_version: {error}"
            ) from error

    def _read(self, model: str, reading: _Reading) -> None:
        try:
            reading.found.set_result(self._digests(model))
        except BaseException as error:  # noqa: BLE001 - raised in the callers
            reading.found.set_exception(error)

    def _digests(self, model: str) -> dict[str, object]:
        name = model.partition(DECORATION)[0]
        weights = model_digest(name)
        if not weights and not self._version:
            lmcache_logger().warning(
                "kvdepot: no weight files of %s are found on this machine, so KV of earlier weights with this name is "
                "served after they change: set weights_version to a name that changes whenever the weights do",
                name,
            )
        found = {"weights_digest": weights, "config_digest": config_file_digest(name)}
        return {fact: digest for fact, digest in found.items() if digest}
