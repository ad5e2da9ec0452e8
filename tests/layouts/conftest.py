"""Layouts are tested with vLLM's own classes, without a model and without a GPU: `make test-layouts`."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this interpreter", allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-layouts", action="store_true", help="write what is found into docs/layouts.md")
