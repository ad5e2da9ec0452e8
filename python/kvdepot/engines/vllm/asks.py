"""A request's own settings for loading and storing, in ``kv_transfer_params``.

The keys without a prefix have the names and the meaning that vLLM's own offloading connector gave them. An unreadable
value gets its key's strictest meaning: a client that meant to forbid something must not be ignored. Unknown keys are
logged and counted, but are never an error, because other connectors have keys of their own.
"""

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.priority import PRIORITIES, Priority

logger = connector_logger()

MAX_LOAD = "max_load_tokens"
MAX_STORE = "max_offload_tokens"
LOAD_TIERS = "kv_load_tiers"
NO_LOAD = "kvdepot.no_load"
NO_STORE = "kvdepot.no_store"
PRIORITY = "kvdepot.priority"
KEYS = (MAX_LOAD, MAX_STORE, LOAD_TIERS, NO_LOAD, NO_STORE, PRIORITY)

REMOTE_PREFILL = "do_remote_prefill"
"""Key of the connectors that hand over KV between engines; they unset it when they begin to load."""

MEDIA = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")
TIERS = {
    "Dax": ("CPU", "LOCAL"),
    "Mooncake": (None, "REMOTE"),
    "Object": ("STORAGE", "REMOTE"),
    "Posix": ("STORAGE", None),
    "Remote": (None, "REMOTE"),
    "Slab": ("STORAGE", "LOCAL"),
}
"""Known medium and locality of a tier, by its word in the pipeline; what is unknown matches every filter.

A directory may be on a file server, and a pool server or Mooncake may have memory and disks.
"""

KEYS_TOLD_MAX = 64
"""Maximum number of unknown keys that are logged and remembered: clients choose them."""

SHORT = reprlib.Repr()
"""Formats a client's key or value as a single line of limited length."""
SHORT.maxstring = SHORT.maxother = 80

POOL_ONLY = "it is loaded from host memory alone"


def is_prefilled_remotely(params: Any) -> bool:
    """Returns whether another engine has computed the prompt, and a connector beside this one is about to load it.

    ``params``: the request's ``kv_transfer_params`` now; not kept, because the other connector changes them.
    """
    return isinstance(params, Mapping) and bool(params.get(REMOTE_PREFILL))


@dataclass(frozen=True)
class Ask:
    """A request's own limits.

    Attributes:
        load_tokens_max: maximum tokens to load beyond what vLLM already has; ``None`` = no limit, 0 = no lookup.
        store_tokens_max: leading tokens of the request, prompt and answer, whose blocks may be stored; ``None`` =
            all, 0 = none.
        tiers: words of the tiers below the pool that blocks may come from; ``None`` = all.
        priority: how long its blocks stay in host memory, compared with others.
    """

    load_tokens_max: int | None = None
    store_tokens_max: int | None = None
    tiers: tuple[str, ...] | None = None
    priority: Priority = "normal"


class Asks:
    """Reads the settings of requests, and logs once what it does not understand."""

    def __init__(self, tiers: Sequence[str], stats: DepotStats) -> None:
        """``tiers``: words of the pipeline below the pool; ``stats``: counts what is not understood."""
        self._tiers = {word: TIERS.get(word, (None, None)) for word in tiers}
        self._stats = stats
        self._told: set[str] = set()
        self._keys_told: set[str] = set()

    def read(self, params: Any) -> Ask:
        """Reads a request's ``kv_transfer_params``; ``None`` = it has none."""
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
        return Ask(load_max, store_max, self._allowed(params), self._priority(params))

    def _tokens(self, params: Mapping[Any, Any], key: str, strictly: str) -> int | None:
        value = params.get(key)
        if value is None or (type(value) is int and value >= 0):  # a bool is not a number here
            return value
        self._malformed(key, value, "a whole number of tokens, 0 or more", strictly)
        return 0

    def _flag(self, params: Mapping[Any, Any], key: str, strictly: str) -> bool:
        value = params.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._malformed(key, value, "true or false", strictly)
        return True

    def _priority(self, params: Mapping[Any, Any]) -> Priority:
        value = params.get(PRIORITY)
        if value is None:
            return "normal"
        for known in PRIORITIES:
            if value == known:
                return known
        self._malformed(PRIORITY, value, f"one of {', '.join(PRIORITIES)}", "its blocks get the lowest")
        return "low"

    def without_tiers(self, ask: Ask, error: Exception) -> Ask:
        """Returns the settings of a request whose tiers the depot does not know."""
        said = "kvdepot: %s of a request cannot be followed: %s; %s (logged once)"
        self._tell_once(f"{LOAD_TIERS} is unknown", said, LOAD_TIERS, str(error), POOL_ONLY)
        return replace(ask, tiers=())

    def _allowed(self, params: Mapping[Any, Any]) -> tuple[str, ...] | None:
        """Returns the tiers that a request allows. The pool is not a tier that a filter can exclude."""
        filters = params.get(LOAD_TIERS)
        if filters is None:
            return None
        allowed: set[str] = set()
        for one in filters if isinstance(filters, list) else [None]:
            matched = self._matched(one)
            if matched is None:
                wanted = f"a list of objects with medium ({', '.join(MEDIA)}) and locality ({', '.join(LOCALITIES)})"
                self._malformed(LOAD_TIERS, filters, wanted, POOL_ONLY)
                return ()
            allowed |= matched
        return None if len(allowed) == len(self._tiers) else tuple(word for word in self._tiers if word in allowed)

    def _matched(self, wanted: Any) -> set[str] | None:
        """Returns the words of the tiers that one filter names; ``None`` if it cannot be read."""
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
            word
            for word, (its_medium, its_locality) in self._tiers.items()
            if medium in (None, its_medium or medium) and locality in (None, its_locality or locality)
        }

    def _malformed(self, key: str, value: Any, wanted: str, strictly: str) -> None:
        self._stats.add("params_malformed")
        said = "kvdepot: %s of a request must be %s, got %s; %s (logged once)"
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
        logger.warning("kvdepot: kv_transfer_params has an unknown key %s: %s (logged once)", name, hint)
