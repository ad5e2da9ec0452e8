"""P10: a variable for every key: which source takes effect, and that no variable with our prefix is silently
ignored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvdepot.cli import main
from kvdepot.config import KVDepotConfig, Machine, load_config
from kvdepot.config.variables import unknown_variables, variable_of
from kvdepot.errors import ConfigError

KEYS = KVDepotConfig.key_table()
SPECIAL = {
    "pipeline": ("Cache", "Cache"),
    "pool_gb": ("0.5", 0.5),
    "directories": ("/a:/b", ("/a", "/b")),
    "remote_servers": ("a:1,b:2", ("a:1", "b:2")),
    "gdr_nics": ("mlx5_0, mlx5_1", ("mlx5_0", "mlx5_1")),
    "copy_engines_forbidden": ("batch,kernel", ("batch", "kernel")),
}


def sample(name: str, kind: str) -> tuple[str, object]:
    """Returns a text for a key's variable and the resulting value; not the default where that is easy."""
    if name in SPECIAL:
        return SPECIAL[name]
    words = kind.split(" | ")
    if "true" in words:
        value = "false" if KVDepotConfig.model_fields[name].default is True else "true"
        return value, value == "true"
    if kind == "int":
        default = KVDepotConfig.model_fields[name].default
        return (str(default), default) if default is not None else ("1", 1)
    if kind == "number":
        return "1", 1.0
    if len(words) > 1:
        return words[-1], words[-1]
    return ("/somewhere", "/somewhere") if name != "remote_tls_server_name" else ("pool.example", "pool.example")


def environ(machine: Machine, **variables: str) -> Machine:
    return replace(machine, environ={**machine.environ, **variables})


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_has_a_variable(key: Any, machine: Machine) -> None:
    text, value = sample(key.name, key.type)
    here = environ(machine, **{variable_of(key.name): text})
    refused = ""
    try:
        config = load_config(None, machine=here, owns_pool=False)
    except ConfigError as error:
        refused = str(error)
    if refused:
        # A rule between keys, or a value that this version does not accept: it was read, and the variable is named.
        assert f"environment variable {variable_of(key.name)}" in refused
        return
    assert getattr(config, key.name) == value
    setting = next(one for one in config.effective(here) if one.key == key.name)
    assert setting.origin == f"environment {variable_of(key.name)}"


def test_the_environment_goes_before_a_file_and_not_before_a_dict(tmp_path: Path, machine: Machine) -> None:
    file = tmp_path / "kvdepot.yaml"
    file.write_text("pool_gb: 1\ntimeout_ms: 5\n")
    here = environ(machine, KVDEPOT_POOL_GB="2", KVDEPOT_EVICTION="lru")
    config = load_config(file, machine=here)
    assert (config.pool_gb, config.timeout_ms, config.eviction) == (2.0, 5, "lru")
    assert (config.origins["pool_gb"], config.origins["timeout_ms"]) == ("environment KVDEPOT_POOL_GB", f"{file}:2")
    config = load_config({"pool_gb": 3}, machine=here)
    assert (config.pool_gb, config.eviction) == (3.0, "lru")
    assert load_config(config, machine=environ(machine, KVDEPOT_POOL_GB="9")).pool_gb == 3.0


def test_files_in_the_seeds_spelling_are_overruled_as_well(seeds: Path, machine: Machine) -> None:
    config = load_config(seeds / "000_pipeline.yaml", machine=environ(machine, KVDEPOT_DIRECTORIES="/a:/b"))
    assert config.model_dump()["directories"] == ("/a", "/b")


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("KVDEPOT_POOL_GB", "many", "valid number"),
        ("KVDEPOT_POOL_GB", "-1", "greater than 0"),
        ("KVDEPOT_POOL_MLOCK", "perhaps", "valid boolean"),
        ("KVDEPOT_EVICTION", "fifo", "lhd"),
        ("KVDEPOT_TIMEOUT_MS", "1.5", "valid integer"),
        ("KVDEPOT_DIRECTORIES", "relative", "absolute path"),
        ("KVDEPOT_POOL_GB", "[1", "valid number"),
    ],
)
def test_wrong_values_name_the_variable(machine: Machine, variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {variable}: .*{said}"):
        load_config(None, machine=environ(machine, **{variable: text}))


def test_a_wrong_value_is_shown_without_a_password(machine: Machine) -> None:
    here = environ(machine, KVDEPOT_OBJECT_ENDPOINT="http://user:geheim@host")
    with pytest.raises(ConfigError, match=r"KVDEPOT_OBJECT_ENDPOINT.*://…@host") as caught:
        load_config({"pipeline": "Cache|Object", "object_url": "s3://b"}, machine=here)
    assert "geheim" not in str(caught.value)


def test_empty_variables_and_those_of_kubernetes_services_say_nothing(machine: Machine) -> None:
    here = environ(machine, KVDEPOT_POOL_GB=" ", KVDEPOT_METRICS_PORT="tcp://10.0.0.1:9400")
    config = load_config(None, machine=here)
    assert (config.pool_gb, config.metrics_port) == (None, None)
    services = {
        "KVDEPOT_SERVICE_HOST": "10.0.0.1",
        "KVDEPOT_PORT_22345_TCP_ADDR": "10.0.0.1",
        "KVDEPOT_PORT": "tcp://x",
    }
    assert list(unknown_variables(KEYS, services)) == []


def test_unknown_variables_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvdepot.yaml"
    file.write_text("pool_gb: 0.0625\npipeline: Cache\n")
    monkeypatch.setenv("KVDEPOT_POOL_BG", "1")
    monkeypatch.setenv("KVDEPOT_LOG", "info")
    shown = json.loads(CliRunner().invoke(main, ["config", "check", str(file), "--json"]).stdout)
    warnings = [one for one in shown["warnings"] if "KVDEPOT_POOL_BG" in one]
    assert (len(warnings), len([one for one in shown["warnings"] if "KVDEPOT_LOG" in one])) == (1, 0)
    assert "did you mean KVDEPOT_POOL_GB?" in warnings[0]


def test_an_option_goes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr("kvdepot._native.serve", lambda core, *_, **__: served.append(json.loads(core)))
    monkeypatch.setattr("kvdepot._native.init_logging", lambda *_, **__: None)
    monkeypatch.setenv("KVDEPOT_DRAIN_TIMEOUT_S", "7")
    monkeypatch.setenv("KVDEPOT_PIPELINE", "Cache")
    monkeypatch.setenv("KVDEPOT_POOL_GB", "0.5")
    socket = str(tmp_path / "s")
    assert CliRunner().invoke(main, ["serve", "--socket", socket]).exit_code == 0
    assert CliRunner().invoke(main, ["serve", "--socket", socket, "--drain-timeout", "9"]).exit_code == 0
    assert [(one["drain_timeout_ms"], one["pool_bytes"]) for one in served] == [(7000, 1 << 29), (9000, 1 << 29)]


def test_variables_of_tiers_outside_a_dicts_pipeline_say_nothing(tmp_path: Path, machine: Machine) -> None:
    here = environ(machine, KVDEPOT_REMOTE_SERVERS="a:1", KVDEPOT_DIRECTORIES="/a", KVDEPOT_POOL_GB="2")
    config = load_config({"pipeline": "Cache"}, machine=here)
    assert (config.pool_gb, config.origins.get("directories")) == (2.0, None)
    assert load_config({"pipeline": "Posix"}, machine=here).model_dump()["directories"] == ("/a",)
    file = tmp_path / "kvdepot.yaml"
    file.write_text("pipeline: Cache\n")
    with pytest.raises(ConfigError, match="KVDEPOT_DIRECTORIES"):
        load_config(file, machine=here)


def test_the_environment_does_not_stop_an_engines_depot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's dict says Cache|Remote: the depot that it starts must not read the variable beside defaults."""
    served: list[dict[str, Any]] = []
    monkeypatch.setattr("kvdepot._native.serve", lambda core, *_, **__: served.append(json.loads(core)))
    monkeypatch.setattr("kvdepot._native.init_logging", lambda *_, **__: None)
    monkeypatch.setattr("kvdepot.cli.serve._detach", lambda: None)
    monkeypatch.setenv("KVDEPOT_REMOTE_SERVERS", "127.0.0.1:1")
    config = load_config({"pipeline": "Cache|Remote", "pool_gb": 0.0625})
    command = config.depot_command("/s")
    assert command is not None
    result = CliRunner().invoke(main, command[command.index("serve") :])
    assert result.exit_code == 0, result.output
    assert served[0] == json.loads(config.to_core_json())
    monkeypatch.setenv("KVDEPOT_DIRECTORIES", "/a")
    assert CliRunner().invoke(main, ["serve", "--service-port", "0", "--socket", "/s"]).exit_code == 0


def test_the_variables_are_documented_from_the_table() -> None:
    rows = json.loads(CliRunner().invoke(main, ["config", "keys", "--json"]).stdout)
    assert [row["variable"] for row in rows] == [variable_of(key.name) for key in KEYS]
    assert "`KVDEPOT_PIPELINE`" in CliRunner().invoke(main, ["config", "keys", "--markdown"]).stdout
