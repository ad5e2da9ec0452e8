"""The plugin that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

With it ``--kv-transfer-config`` needs no ``kv_connector_module_path``, and the API server can read the connector's
statistics below ``MultiConnector``, which looks connectors up by class name. ``VLLM_PLUGINS`` can exclude it.
"""

import contextlib

MODULE = "kvdepot.engines.vllm"
NAMES = ("KVDepotConnector", "UCMConnector")


def register() -> None:
    """Registers the connector's names with vLLM, which imports it only on use.

    May be called repeatedly. If vLLM already has a connector of that name, it keeps that one.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        with contextlib.suppress(ValueError):  # the name is taken, usually by us
            KVConnectorFactory.register_connector(name, MODULE, name)
