"""What a request itself says about loading and storing, in ``kv_transfer_params``.

The keys without a prefix have the names that vLLM's own offloading connector gave them, and their meaning. A value that
cannot be read has the strictest meaning of its key: a client that meant to forbid something must not be overheard. Keys
that are not known are told and counted, never an error, because connectors beside this one have keys of their own.
"""

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.stats import DepotStats

logger = connector_logger()

MAX_LOAD = "max_load_tokens"
MAX_STORE = "max_offload_tokens"
LOAD_TIERS = "kv_load_tiers"
NO_LOAD = "kvdepot.no_load"
NO_STORE = "kvdepot.no_store"
KEYS = (MAX_LOAD, MAX_STORE, LOAD_TIERS, NO_LOAD, NO_STORE)

MEDIA = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")
TIERS = {"Posix": ("STORAGE", None), "Remote": (None, "REMOTE")}
"""What is known of a tier's medium and locality by its word in the pipeline; what is not known fits every filter."""

KEYS_TOLD_MAX = 64
"""Unknown keys that are named in the log, and remembered: clients choose them."""

SHORT = reprlib.Repr()
"""Shows a client's key or value in one line, and not longer than one."""
SHORT.maxstring = SHORT.maxother = 80

POOL_ONLY = "it is loaded from host memory alone"


@dataclass(frozen=True)
class Ask:
    """A request's own bounds.

    Attributes:
        load_tokens_max: tokens beyond what vLLM has itself that may be loaded; ``None`` = any number, 0 = nothing is
            looked up.
        store_tokens_max: tokens from the request's beginning, prompt and answer, whose blocks may be stored; ``None`` =
            all, 0 = none.
        pool_only: only blocks that are in host memory when the request is looked up.
    """

    load_tokens_max: int | None = None
    store_tokens_max: int | None = None
    pool_only: bool = False


class Asks:
    """Reads what requests ask for, and says once what it does not understand."""

    def __init__(self, tiers: Sequence[str], stats: DepotStats) -> None:
        """``tiers``: words of the pipeline below the pool; ``stats``: counts what is not understood."""
        self._tiers = [TIERS.get(word, (None, None)) for word in tiers]
        self._stats = stats
        self._told: set[str] = set()
        self._keys_told: set[str] = set()

    def read(self, params: Any) -> Ask:
        """A request's ``kv_transfer_params``; ``None`` = it has none."""
        if params is None:
            return Ask()
        if not isinstance(params, Mapping):
            self._malformed("kv_transfer_params", params, "an object", "it is neither loaded nor stored")
            return Ask(load_tokens_max=0, store_tokens_max=0)
        for key in params:
            if key not in KEYS:
                self._unknown(key)
        load_max = self._tokens(params, MAX_LOAD, "it is not loaded")
        store_max = self._tokens(params, MAX_STORE, "it is not stored")
        if self._flag(params, NO_LOAD, "it is not loaded"):
            load_max = 0
        if self._flag(params, NO_STORE, "it is not stored"):
            store_max = 0
        return Ask(load_max, store_max, self._pool_only(params))

    def _tokens(self, params: Mapping[Any, Any], key: str, strictly: str) -> int | None:
        value = params.get(key)
        if value is None or (type(value) is int and value >= 0):  # a bool is no number here
            return value
        self._malformed(key, value, "a whole number of tokens, 0 or more", strictly)
        return 0

    def _flag(self, params: Mapping[Any, Any], key: str, strictly: str) -> bool:
        value = params.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._malformed(key, value, "true or false", strictly)
        return True

    def _pool_only(self, params: Mapping[Any, Any]) -> bool:
        """Whether the request may not have blocks of every tier. The pool is no tier that a filter can leave out."""
        filters = params.get(LOAD_TIERS)
        if filters is None:
            return False
        allowed: set[int] = set()
        for one in filters if isinstance(filters, list) else [None]:
            matched = self._matched(one)
            if matched is None:
                wanted = f"a list of objects with medium ({', '.join(MEDIA)}) and locality ({', '.join(LOCALITIES)})"
                self._malformed(LOAD_TIERS, filters, wanted, POOL_ONLY)
                return True
            allowed |= matched
        if not allowed:
            return bool(self._tiers)
        if len(allowed) < len(self._tiers):
            # A claim cannot choose among the tiers.
            said = (
                "kvdepot: %s of a request allows only some tiers, among which it cannot choose; %s (this is said once)"
            )
            self._tell_once(f"{LOAD_TIERS} chooses", said, LOAD_TIERS, POOL_ONLY)
        return len(allowed) < len(self._tiers)

    def _matched(self, wanted: Any) -> set[int] | None:
        """Positions of the tiers that one filter names; ``None`` when it cannot be read."""
        if not isinstance(wanted, Mapping) or set(wanted) - {"medium", "locality"}:
            return None
        found = []
        for name, known in (("medium", MEDIA), ("locality", LOCALITIES)):
            value = wanted.get(name)
            if value is not None and (not isinstance(value, str) or value.upper() not in known):
                return None
            found.append(value.upper() if value is not None else None)
        medium, locality = found
        return {
            index
            for index, (its_medium, its_locality) in enumerate(self._tiers)
            if medium in (None, its_medium or medium) and locality in (None, its_locality or locality)
        }

    def _malformed(self, key: str, value: Any, wanted: str, strictly: str) -> None:
        self._stats.add("params_malformed")
        said = "kvdepot: %s of a request must be %s, got %s; %s (this is said once)"
        self._tell_once(f"{key} is malformed", said, key, wanted, SHORT.repr(value), strictly)

    def _tell_once(self, topic: str, said: str, *values: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            logger.warning(said, *values)

    def _unknown(self, key: Any) -> None:
        self._stats.add("params_unknown")
        name = SHORT.repr(key)
        if name in self._keys_told or len(self._keys_told) >= KEYS_TOLD_MAX:
            return
        self._keys_told.add(name)
        near = difflib.get_close_matches(name.strip("'"), KEYS, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "it may be another connector's"
        logger.warning("kvdepot: kv_transfer_params has an unknown key %s: %s (this is said once)", name, hint)
