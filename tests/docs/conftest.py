"""Runs of vLLM take minutes where others take seconds: `-m "not vllm"` leaves them out."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: starts vLLM")
