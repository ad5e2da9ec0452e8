"""kvdepot in vLLM: ``--kv-transfer-config`` names ``KVDepotConnector``.

vLLM imports this module in its API server, its engine core and every worker, so importing it does nothing but define
the class and make it known to vLLM; the core and the configuration are reached in the constructor.
"""

from kvdepot.engines.vllm.connector import KVDepotConnector
from kvdepot.engines.vllm_plugin import register

UCMConnector = KVDepotConnector
"""The class under the name that existing launch lines use."""

# For launch lines that name this module where vLLM's plugins are off: `MultiConnector` looks classes up by name.
register()

__all__ = ["KVDepotConnector", "UCMConnector"]
