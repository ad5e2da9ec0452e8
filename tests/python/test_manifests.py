"""The Kubernetes manifests are valid for the command line and the configuration."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvdepot.cli.serve import command
from kvdepot.cli.stat import command as stat
from kvdepot.config import load_config
from kvdepot.errors import ConfigError

MANIFESTS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "kubernetes").glob("*.yaml"))

START_S = 600
"""How long a container may take to start: to touch a large pool, or to download a model."""
HANG_S = 60
"""How long a container may not answer before it is killed."""


def documents(kind):
    found = [one for file in MANIFESTS for one in yaml.safe_load_all(file.read_text("utf-8"))]
    return [one for one in found if one["kind"] == kind]


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_have_the_schema_of_kubernetes(file, version):
    """Strict: a key that Kubernetes does not know is an error, where `kubectl apply` may drop it silently."""
    for one in yaml.safe_load_all(file.read_text("utf-8")):
        kubernetes_validate.validate(one, version, strict=True)


def test_a_misspelt_key_of_a_manifest_is_found():
    (one,) = documents("DaemonSet")
    one["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


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
    # The rest is for closing connections and tiers.
    assert drain_timeout_s + 10 <= spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("pod", ["kvdepot", "kvdepot-pool", "vllm"])
def test_every_container_is_probed_and_limited(pod):
    """A start probe, too: without one the liveness probe kills a container that is still touching its pool."""
    spec = pods()[pod]
    for container in spec["containers"]:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert {"exec", "httpGet"} & set(container[kind]), (container["name"], kind)
        start, live = container["startupProbe"], container["livenessProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= START_S
        assert live["periodSeconds"] * live["failureThreshold"] >= HANG_S
        ports = [port for port in container["ports"] for port in port.values()]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert "exec" in container[kind] or container[kind]["httpGet"]["port"] in ports
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]), container["name"]
        assert "memory" in resources["limits"], container["name"]


def test_an_engine_is_in_service_with_and_without_a_depot():
    """Its probes ask vLLM at vLLM's own port, and its start waits for no other pod."""
    (container,) = pods()["vllm"]["containers"]
    assert "initContainers" not in pods()["vllm"]
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]
    assert "--port" not in " ".join(container["args"])
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[kind]["httpGet"] == {"path": "/health", "port": "http"}


def test_the_daemon_set_waits_for_its_turn_and_is_probed_where_engines_attach(machine, tmp_path):
    (one,) = documents("DaemonSet")
    (container,) = one["spec"]["template"]["spec"]["containers"]
    _, *options = container["args"]
    assert command.make_context("serve", options).params["wait_for_lock"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, verb, *options = container[kind]["exec"]["command"]
        assert (program, verb) == ("kvdepot", "stat")
        assert stat.make_context("stat", options).params["socket"] == depot_config(machine, tmp_path).socket
    # A depot that ends before this one drains for as long as its grace period permits.
    liveness = container["livenessProbe"]
    grace_s = one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > grace_s


def test_prometheus_finds_the_port_of_each_depot(machine, tmp_path):
    (one,) = documents("DaemonSet")
    pod = one["spec"]["template"]
    config = depot_config(machine, tmp_path)
    assert config.metrics_host == "0.0.0.0"
    assert pod["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(config.metrics_port),
        "prometheus.io/path": "/metrics",
    }
    (container,) = pod["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": config.metrics_port}]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert Path(config.metrics_token_file).parent == mounts["metrics-token"]


def test_the_secret_that_prometheus_sends_is_not_the_pools(machine, tmp_path):
    """A scrape sends it without TLS, and the pool's secret permits writing."""
    config = depot_config(machine, tmp_path)
    assert config.remote_token_file
    assert config.metrics_token_file != config.remote_token_file
    secrets = {one["name"]: one["secret"]["secretName"] for one in pods()["kvdepot"]["volumes"] if "secret" in one}
    assert secrets == {"token": "kvdepot-token", "metrics-token": "kvdepot-metrics-token"}


def test_engines_start_no_depot_in_their_pod_and_do_not_mind_its_size(small_machine, machine, tmp_path):
    assert not depot_config(machine, tmp_path).start_depot
    assert depot_config(small_machine, tmp_path, owns_pool=False).pool_gb > 16
    with pytest.raises(ConfigError, match="of memory"):
        depot_config(small_machine, tmp_path)


def depot_config(machine, tmp_path, **more):
    """The configuration that the depot's DaemonSet and the engines mount."""
    (one,) = (one for one in documents("ConfigMap") if one["metadata"]["name"] == "kvdepot")
    file = tmp_path / "depot.yaml"
    file.write_text(one["data"]["depot.yaml"])
    return load_config(file, machine=machine, **more)


def test_configurations_are_right(machine, tmp_path):
    for one in documents("ConfigMap"):
        for name, text in one["data"].items():
            file = tmp_path / f"{one['metadata']['name']}-{name}"
            file.write_text(text)
            config = load_config(file, machine=machine)
            assert config.socket


def pods():
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in workloads()}


def workloads():
    return [one for kind in ("DaemonSet", "StatefulSet", "Deployment") for one in documents(kind)]


@pytest.mark.parametrize("pod", ["kvdepot", "kvdepot-pool", "vllm"])
def test_containers_run_without_root_and_capabilities(pod):
    spec = pods()[pod]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert not {"runAsUser", "runAsNonRoot", "privileged"} & set(context)
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        # vLLM's image writes where it likes.
        assert pod == "vllm" or context["readOnlyRootFilesystem"]


def test_depot_and_engines_run_as_the_user_of_the_image():
    """The depot's socket admits its own user, and that user has to own the socket's directory."""
    image = (MANIFESTS[0].parents[1] / "docker" / "Dockerfile").read_text("utf-8")
    (uid,) = {int(found) for found in re.findall(r"^USER (\d+):", image, re.MULTILINE)}
    for spec in pods().values():
        context = spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, uid, uid)
    (init,) = pods()["kvdepot"]["initContainers"]
    program, *options = init["command"]
    assert program == "install"
    assert {"--directory", f"--owner={uid}", f"--group={uid}", "/run/kvdepot"} <= set(options)
    # `install` gives the directory away, and then sets the mode of a directory that is no longer its own.
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}


def test_only_the_user_of_a_pod_reads_the_token():
    for spec in pods().values():
        secrets = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secrets
        assert all(one["defaultMode"] == 0o440 for one in secrets)


def test_a_read_only_container_can_write_where_its_configuration_says(machine, tmp_path):
    for name, file in (("kvdepot", "depot.yaml"), ("kvdepot-pool", "pool.yaml")):
        (text,) = (one["data"][file] for one in documents("ConfigMap") if one["metadata"]["name"] == name)
        (tmp_path / file).write_text(text)
        config = load_config(tmp_path / file, machine=machine)
        (container,) = pods()[name]["containers"]
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        for path in (str(Path(config.socket).parent), *(config.directories or ())):
            assert path in writable, (name, path)
