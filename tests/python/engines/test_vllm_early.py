"""Mistakes are found when vLLM asks for the connector's class, as its factory does, and are not a ``ValueError``."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.engines.vllm.early import WrongConfigurationError, caller_config
from kvdepot.errors import KVDepotError

MODULE = "kvdepot.engines.vllm"


def transfer(name: str = "KVDepotConnector", **extra: Any) -> Any:
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


def get_connector_class(kv_transfer_config: Any) -> Any:
    """Like vLLM's factory: by the module's path."""
    return getattr(importlib.import_module(MODULE), kv_transfer_config.kv_connector)


def get_registered_class(kv_transfer_config: Any) -> Any:
    """Like vLLM's factory: by a separate loader, which knows nothing of the configuration."""

    def loader() -> Any:
        return getattr(importlib.import_module(MODULE), "KVDepotConnector")  # noqa: B009 - as vLLM does

    assert kv_transfer_config is not None
    return loader()


class Config:
    """Like vLLM's configuration during its construction."""

    cache_config = SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=True)
    compilation_config = None

    def __init__(self, kv_transfer_config: Any) -> None:
        self.kv_transfer_config = kv_transfer_config
        self.found = caller_config_of_a_question()


def caller_config_of_a_question() -> Any:
    return caller_config()


@pytest.mark.parametrize("ask", [get_connector_class, get_registered_class])
def test_a_mistake_is_told_to_whoever_asks_for_the_class(ask: Any) -> None:
    with pytest.raises(WrongConfigurationError, match="pool_bg: unknown key: did you mean pool_gb") as caught:
        ask(transfer(pool_bg=1))
    assert isinstance(caught.value, KVDepotError)
    assert not isinstance(caught.value, ValueError), "vLLM's configuration would wrap it"
    assert caught.value.kind == "config"


@pytest.mark.parametrize("ask", [get_connector_class, get_registered_class])
def test_a_right_configuration_gets_the_class(ask: Any) -> None:
    assert ask(transfer(hit_ratio=0.5)).__name__ == "KVDepotConnector"


def test_another_connector_s_configuration_is_none_of_our_business() -> None:
    assert get_registered_class(transfer("NixlConnector", pool_bg=1)).__name__ == "KVDepotConnector"


def test_both_names_are_one_class_and_others_are_none() -> None:
    module = importlib.import_module(MODULE)
    assert module.UCMConnector is module.KVDepotConnector
    with pytest.raises(AttributeError, match="no attribute 'KVDepotOther'"):
        getattr(module, "KVDepotOther")  # noqa: B009 - it is the test


def test_the_configuration_in_the_making_is_found_above() -> None:
    config = Config(transfer())
    assert config.found is config
    assert caller_config_of_a_question() is None
