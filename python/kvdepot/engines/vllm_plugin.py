"""The plugin that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

With it ``--kv-transfer-config`` needs no ``kv_connector_module_path``, and the API server can read the connector's
statistics below ``MultiConnector``, which looks connectors up by their class's name. ``VLLM_PLUGINS`` can leave it out.
"""

import contextlib

MODULE = "kvdepot.engines.vllm"
NAMES = ("KVDepotConnector", "UCMConnector")


def register() -> None:
    """Makes the connector known to vLLM by its names, which imports it only when it is used.

    May be called any number of times. A vLLM that has a connector of that name keeps its own.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        with contextlib.suppress(ValueError):  # the name is taken, most often by us
            KVConnectorFactory.register_connector(name, MODULE, name)
