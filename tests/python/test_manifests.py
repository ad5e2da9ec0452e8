"""The Kubernetes manifests say what the command line and the configuration understand."""

from pathlib import Path

import pytest
import yaml

from kvdepot.cli.serve import command
from kvdepot.config import load_config

MANIFESTS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "kubernetes").glob("*.yaml"))


def documents(kind):
    found = [one for file in MANIFESTS for one in yaml.safe_load_all(file.read_text("utf-8"))]
    return [one for one in found if one["kind"] == kind]


def test_there_are_manifests():
    assert [file.name for file in MANIFESTS] == ["depot.yaml", "pool.yaml", "vllm.yaml"]


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_servers_are_started_with_options_that_exist(kind, tmp_path):
    (one,) = documents(kind)
    (container,) = one["spec"]["template"]["spec"]["containers"]
    verb, *options = container["args"]
    assert (container["command"], verb) == (["kvdepot"], "serve")
    command.make_context("serve", options)


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_servers_may_write_what_they_drain(kind):
    (one,) = documents(kind)
    spec = one["spec"]["template"]["spec"]
    _, *options = spec["containers"][0]["args"]
    drain_timeout_s = command.make_context("serve", options).params["drain_timeout"]
    # Connections and tiers are closed in the rest.
    assert drain_timeout_s + 10 <= spec["terminationGracePeriodSeconds"]


def test_configurations_are_right(machine, tmp_path):
    for one in documents("ConfigMap"):
        for name, text in one["data"].items():
            file = tmp_path / f"{one['metadata']['name']}-{name}"
            file.write_text(text)
            config = load_config(file, machine=machine)
            assert config.socket
