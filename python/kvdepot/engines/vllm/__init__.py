"""kvdepot in vLLM: ``--kv-transfer-config`` names ``KVDepotConnector``, or ``UCMConnector`` in existing commands.

vLLM imports this module in its API server, its engine core and every worker, so importing it only registers the
connector with vLLM. The class is created on first access, which also checks the configuration for mistakes.
"""

from typing import TYPE_CHECKING

from kvdepot.engines.vllm_plugin import NAMES, register

if TYPE_CHECKING:
    from kvdepot.engines.vllm.connector import KVDepotConnector
    from kvdepot.engines.vllm.connector import KVDepotConnector as UCMConnector

# For launch commands that name this module with vLLM's plugins disabled: `MultiConnector` looks classes up by name.
register()

__all__ = ["KVDepotConnector", "UCMConnector"]


def __getattr__(name: str) -> "type[KVDepotConnector]":
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.engines.vllm.early import check_callers, check_release

    check_release()
    from kvdepot.engines.vllm.connector import KVDepotConnector

    check_callers()
    return KVDepotConnector
