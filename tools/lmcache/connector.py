"""LMCache's connector in vLLM: its configuration, and what vLLM needs to run with it on a CPU."""

from types import MappingProxyType
from typing import Any

from tools.lab.ports import LOOPBACK

VARIABLES = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
"""Variables of a vLLM with LMCache: nothing is reported to anybody, and hashes are the same in all processes."""


def transfer(port: int) -> dict[str, Any]:
    """Returns vLLM's transfer configuration for LMCache's server at this port."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": port},
    }


def look_past_libraries() -> None:
    """Works around vLLM 0.32, which looks names up in all objects of all modules: a library of numba has any name."""
    import vllm.triton_utils.dispatcher as dispatcher

    def names(thing: Any) -> Any:
        found = thing.__dict__
        return found if isinstance(found, dict | MappingProxyType) else {}

    dispatcher.vars = names
