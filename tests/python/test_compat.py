"""Names of other projects: present on request, otherwise absent, and never in the way of the real ones."""

import http.client
import os
import signal
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

import kvdepot
from tools.lab.ports import free_port

RUN_S = 120
"""Limit against a hang of the test itself, not a measure of speed."""
MODULE = "ucm.integration.vllm.ucm_connector"
ENGINES = Path(__file__).parent / "engines"


class Environment:
    """A Python environment of the test's own, in which kvdepot can be imported."""

    def __init__(self, root: Path) -> None:
        venv.create(root, with_pip=False, symlinks=True)
        self.bin = root / "bin"
        self.site = Path(self.python("import sysconfig; print(sysconfig.get_path('purelib'))").strip())

    def environ(self, **more: str) -> dict[str, str]:
        ours = [str(Path(kvdepot.__file__).parents[1]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(ours), "PATH": f"{self.bin}:/usr/bin:/bin", **more}

    def run(self, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(words, env=self.environ(**more), capture_output=True, text=True, timeout=RUN_S)

    def python(self, script: str, **more: str) -> str:
        done = self.run(self.bin / "python", "-c", script, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compat(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.bin / "python", "-m", "kvdepot", "compat", *arguments)

    def files(self) -> set[str]:
        return {
            str(path.relative_to(self.bin.parent))
            for path in self.bin.parent.rglob("*")
            if "__pycache__" not in str(path)
        }


@pytest.fixture
def environment(tmp_path):
    if not Path(kvdepot._native.__file__).is_file():
        pytest.skip("the core is not built")
    return Environment(tmp_path / "venv")


@pytest.mark.parametrize("name", ["ucm", "infinistore"])
def test_what_is_installed_is_taken_away_whole(environment, name):
    before = environment.files()
    assert name not in str(before)
    for _ in range(2):  # again, over its own files
        done = environment.compat("install", name)
        assert done.returncode == 0, done.stderr
    assert f"{name}" in environment.compat("list", "--json").stdout
    assert environment.files() > before
    assert "removed" in environment.compat("remove", name).stdout
    assert environment.files() == before
    assert "is not installed" in environment.compat("remove", name).stdout


def test_what_an_interrupted_installation_left_is_finished(environment):
    (environment.site / "ucm" / "integration").mkdir(parents=True)
    done = environment.compat("install", "ucm")
    assert done.returncode == 0, done.stderr
    assert environment.compat("remove", "ucm").returncode == 0
    assert not (environment.site / "ucm").exists()


def test_the_module_path_is_the_connectors(environment):
    assert environment.compat("install", "ucm").returncode == 0
    # Stand-in for vLLM where there is none.
    path = os.pathsep.join([environment.environ()["PYTHONPATH"], str(ENGINES)])
    script = f"import conftest, importlib; print(hasattr(importlib.import_module('{MODULE}'), 'Other'))"
    assert environment.python(script, PYTHONPATH=path) == "False\n"
    script = f"""
import conftest, importlib
from kvdepot.engines import vllm
vllm.UCMConnector = object()  # the class itself wants all of vLLM
print(importlib.import_module('{MODULE}').UCMConnector is vllm.UCMConnector)
"""
    assert environment.python(script, PYTHONPATH=path) == "True\n"


@pytest.mark.parametrize("real", ["module", "namespace", "link", "distribution"])
def test_a_real_ucm_is_left_alone(environment, real):
    if real == "module":
        (environment.site / "ucm").mkdir()
        (environment.site / "ucm" / "__init__.py").write_text("REAL = True\n")
    elif real == "namespace":
        (environment.site / "ucm" / "store").mkdir(parents=True)
        (environment.site / "ucm" / "store" / "part.py").write_text("REAL = True\n")
    elif real == "link":
        (environment.site / "of_another").mkdir()
        (environment.site / "ucm").symlink_to("of_another")
    else:
        facts = environment.site / "uc_manager-0.4.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: uc-manager\nVersion: 0.4.0\n")
    before = environment.files()
    done = environment.compat("install", "ucm")
    assert done.returncode == 2
    assert "it conflicts with" in done.stderr
    assert environment.files() == before
    environment.compat("remove", "ucm")
    assert environment.files() == before


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_a_real_infinistore_is_left_alone(environment, tmp_path, place):
    other = environment.bin if place == "beside" else tmp_path / "other"
    other.mkdir(exist_ok=True)
    program = other / "infinistore"
    program.write_text("#!/bin/sh\necho real\n")
    program.chmod(0o755)
    path = f"{environment.bin}:{other}:/usr/bin:/bin"
    done = environment.run(environment.bin / "python", "-m", "kvdepot", "compat", "install", "infinistore", PATH=path)
    assert done.returncode == 2
    assert str(program) in done.stderr
    assert program.read_text() == "#!/bin/sh\necho real\n"


def test_a_file_that_somebody_changed_the_owner_of_stays(environment):
    assert environment.compat("install", "ucm").returncode == 0
    own = environment.site / "ucm" / "integration" / "own.py"
    own.write_text("")
    assert environment.compat("remove", "ucm").returncode == 0
    assert own.is_file()
    assert not (environment.site / "ucm" / "integration" / "vllm").exists()


def test_the_launcher_serves_infinistores_port(environment, tmp_path):
    assert environment.compat("install", "infinistore").returncode == 0
    port, manage = free_port(), free_port()
    program = environment.bin / "infinistore"
    options = ["--service-port", port, "--manage-port", manage, "--prealloc-size", 0.02, "--socket", tmp_path / "s"]
    command = [str(word) for word in [program, *options, "--log-level=debug"]]
    home = environment.environ(XDG_CACHE_HOME=str(tmp_path / "cache"))
    with subprocess.Popen(command, env=home, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = ""
            for line in server.stderr:
                said += line
                if "serving" in line:
                    break
            assert "infinistore: this is kvdepot, which listens on 127.0.0.1" in said
            connection = http.client.HTTPConnection("127.0.0.1", manage, timeout=RUN_S)
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            connection.close()
            assert "infinistore" in Path(f"/proc/{server.pid}/cmdline").read_text()
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
            assert server.wait(RUN_S) == 0


def test_without_options_the_launcher_opens_the_wire_door():
    from kvdepot.cli.infinistore import arguments_of_serve

    assert arguments_of_serve([]) == ["serve", "--service-port", "22345"]
    assert arguments_of_serve(["--service-port=7"]) == ["serve", "--service-port=7"]
