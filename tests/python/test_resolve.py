"""Namespaces that commands open at a depot."""

import json
from types import SimpleNamespace

import pytest

from kvdepot.cli.resolve import Resolved
from kvdepot.errors import UnavailableError
from kvdepot.stored.namespaces import StoredNamespace

ROOT = "3f" * 16


def depot(waiting: int) -> SimpleNamespace:
    """A depot that knows so many provisional namespaces."""
    return SimpleNamespace(
        open_namespace=lambda facts, layout: SimpleNamespace(id=ROOT),
        stats_json=lambda: json.dumps({"depot": {"namespaces_provisional": waiting}}),
    )


def test_what_tiers_have_is_not_told_while_one_does_not_answer():
    found = Resolved(StoredNamespace(ROOT, (), {"model": "tiny"}, ((1, (4096,)),), 0), None)
    assert found.open_with_tiers(depot(0)).id == ROOT
    with pytest.raises(UnavailableError, match="a tier does not answer about 2 namespaces"):
        found.open_with_tiers(depot(2))
    assert found.open_in(depot(2)).id == ROOT
