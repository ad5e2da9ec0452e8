"""kvdepot in vLLM: ``--kv-transfer-config`` names this module and ``KVDepotConnector``.

vLLM imports this module in its API server, its engine core and every worker, so importing it does nothing but define
the class; the core and the configuration are reached in the constructor.
"""

from kvdepot.engines.vllm.connector import KVDepotConnector

UCMConnector = KVDepotConnector
"""The class under the name that existing launch lines use."""

__all__ = ["KVDepotConnector", "UCMConnector"]
