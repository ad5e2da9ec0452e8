"""The plugin that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

With it ``--kv-transfer-config`` needs no ``kv_connector_module_path``, and the API server can read the connector's
statistics below ``MultiConnector``, which looks connectors up by class name. ``VLLM_PLUGINS`` can exclude it.
"""

import contextlib
from collections.abc import Callable
from typing import Any

MODULE = "kvdepot.engines.vllm"
NAMES = ("KVDepotConnector", "UCMConnector")
MULTI = "MultiConnector"


def register() -> None:
    """Registers the connector's names with vLLM, which imports it only on use.

    May be called repeatedly. If vLLM already has a connector of that name, it keeps that one.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        with contextlib.suppress(ValueError):  # the name is taken, usually by us
            KVConnectorFactory.register_connector(name, MODULE, name)
    _check_children(KVConnectorFactory)


def _check_children(factory: Any) -> None:
    """Has the settings of ``MultiConnector``'s children checked when vLLM asks for that class.

    vLLM may ask for no child before it starts the engine: it stops at the first that cannot have several KV-cache
    groups. If a release keeps its connectors in another way, mistakes are found when the engine starts.
    """
    registry: Any = getattr(factory, "_registry", None)
    if isinstance(registry, dict) and MULTI in registry and not isinstance(registry[MULTI], _Checked):
        registry[MULTI] = _Checked(registry[MULTI])


class _Checked:
    """Loads a connector's class after a check of the caller's configuration."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def __call__(self) -> Any:
        from kvdepot.engines.vllm.early import check_callers

        check_callers()
        return self._load()
