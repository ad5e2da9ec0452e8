"""Mistakes are found when vLLM asks for the connector's class, as its factory does, and are not a ``ValueError``."""

import importlib
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvdepot.engines.vllm.early import WrongConfigurationError, caller_config
from kvdepot.engines.vllm_plugin import _check_children
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


def multi(*children: Any) -> Any:
    return transfer("MultiConnector", connectors=[*children])


def child(name: str = "KVDepotConnector", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra}


def plugged(load: Any = lambda: "the class") -> Any:
    """vLLM's factory with the plugin's check, as far as it matters here."""

    class Factory:
        _registry: ClassVar[dict[str, Any]] = {"MultiConnector": load}

        @classmethod
        def get_connector_class(cls, kv_transfer_config: Any) -> Any:
            return cls._registry[kv_transfer_config.kv_connector]()

    for _ in range(2):  # each of vLLM's processes may load plugins again
        _check_children(Factory)
    return Factory


def test_a_child_s_mistake_is_told_to_whoever_asks_for_the_multi_connector() -> None:
    """vLLM may ask for no child: its question about KV-cache groups ends at a sibling that cannot have several."""
    factory = plugged()
    for children in ([child(pool_bg=1)], [child("Sibling", a=1), child("UCMConnector", pool_bg=1)]):
        with pytest.raises(WrongConfigurationError, match="pool_bg: unknown key: did you mean pool_gb"):
            factory.get_connector_class(multi(*children))
    assert factory.get_connector_class(multi(child("Sibling", pool_bg=1), child(hit_ratio=0.5))) == "the class"
    wrong = {"kv_connector": "KVDepotConnector", "kv_connector_extra_config": "x"}
    with pytest.raises(WrongConfigurationError, match="kv_connector_extra_config: must be a mapping"):
        factory.get_connector_class(multi(wrong))


@pytest.mark.parametrize("extra", [None, {}, {"connectors": None}, {"connectors": ["KVDepotConnector"]}])
def test_children_that_cannot_be_read_are_left_to_vllm(extra: Any) -> None:
    config = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    assert plugged().get_connector_class(config) == "the class"


def test_a_factory_without_such_a_registry_stays_as_it_is() -> None:
    for registry in (None, {}, ()):
        factory = SimpleNamespace(_registry=registry)
        _check_children(factory)
        assert factory._registry == registry
    _check_children(object())


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
