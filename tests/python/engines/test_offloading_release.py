"""``KVDepotTier`` in a vLLM with other secondary tiers: the error names the release, and what to do."""

import subprocess
import sys

import pytest

CODE = "from kvdepot.engines.offloading import KVDepotTier"
CONNECTOR_METRICS = "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py"


def import_tier(root):
    """Imports the class in a process whose packages include those of ``root``; returns the last line of its error."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {CODE}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.fixture
def old_vllm(tmp_path):
    """A vLLM 0.31 whose modules are empty."""
    for path in ("__init__.py", "v1/kv_offload/base.py", CONNECTOR_METRICS):
        module = tmp_path / "vllm" / path
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    about = tmp_path / "vllm-0.31.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    return tmp_path


def test_a_release_with_another_interface_is_named(old_vllm):
    error = import_tier(old_vllm)
    assert error.startswith("ImportError: KVDepotTier needs the interface of secondary tiers that vLLM 0.32 has")
    assert "vLLM 0.31.0 has another one" in error
    assert "OffloadingConnectorStats" in error
    assert error.endswith("install vLLM 0.32, or use KVDepotConnector")


def test_another_missing_package_is_not_blamed_on_vllm(old_vllm):
    metrics = old_vllm / "vllm" / CONNECTOR_METRICS
    metrics.write_text("import a_package_that_is_not_there\n")
    assert import_tier(old_vllm) == "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
