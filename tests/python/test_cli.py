"""The command kvdepot: verbs, exit statuses, JSON."""

import contextlib
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvdepot import _native
from kvdepot.cli import VERBS, main
from kvdepot.cli.output import cell_text
from kvdepot.cli.stat import flat
from kvdepot.config import load_config
from kvdepot.errors import ConfigError


@pytest.fixture
def kvdepot():
    def run(*arguments, status=0):
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == status, (result.output, result.exception)
        return result

    return run


def test_every_verb_has_help(kvdepot):
    shown = kvdepot("--help").output
    for verb in VERBS:
        assert f"  {verb} " in shown
        assert "Usage: " in kvdepot(verb, "--help").output


def test_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "kvdepot", "--help"], check=True, capture_output=True, text=True)
    assert "Stores the KV caches of LLM engines outside" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["srve"], "no such command 'srve'"),
        (["--frob"], "no such option"),
        (["stat", "--frob"], "no such option"),
        (["stat", "x"], "unexpected extra argument"),
        (["trace", "generate", "chat"], "missing option '--output'"),
        (["top", "--interval", "x"], "invalid value for '--interval'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_lines_end_with_an_error_in_our_style(kvdepot, words, said):
    result = kvdepot(*words, status=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    verb = [word for word in words[:2] if word in {"stat", "top", "trace", "generate"}]
    assert f"`{' '.join(['main', *verb])} --help`" in line


def test_a_group_without_a_command_shows_its_help(kvdepot):
    assert "Usage: main trace" in kvdepot("trace", status=2).output
    assert kvdepot("--version").stdout.startswith("main, version ")


def interrupt(*_):
    raise KeyboardInterrupt


class Follower:
    """Events that never come."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    __iter__ = content = interrupt


def test_ctrl_c_ends_what_runs_until_then_with_success_and_the_rest_as_interrupted(kvdepot, monkeypatch):
    monkeypatch.setattr("kvdepot.cli.top.look", lambda _: {})
    monkeypatch.setattr("time.sleep", interrupt)
    for words, status in ((["top"], 0), (["top", "--once"], 130)):
        result = kvdepot(*words, status=status)
        assert (result.stdout, result.stderr.strip()) == ("", "")
    monkeypatch.setattr("kvdepot.cli.events.BlockEvents", lambda _: Follower())
    for words, status in ((["events", "--follow", "--socket", "/s"], 0), (["events", "--socket", "/s"], 130)):
        result = kvdepot(*words, status=status)
        assert (result.stdout, result.stderr.strip()) == ("", "")


def test_check(kvdepot, seeds, tmp_path):
    assert kvdepot("config", "check", seeds / "000_pipeline.yaml").output.endswith("000_pipeline.yaml: valid\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("pool_gb: -1\ntimeout_ms: x\n")
    result = kvdepot("config", "check", wrong, status=2)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {wrong}:") for line in lines)
    found = json.loads(kvdepot("config", "check", wrong, "--json", status=2).output)
    assert (found["ok"], len(found["problems"])) == (False, 2)


def test_explain(kvdepot, seeds):
    file = seeds / "000_pipeline.yaml"
    table = kvdepot("config", "explain", file).output
    assert "/mnt/test" in table
    assert f"{file.name}:5" in table
    settings = {row["key"]: row for row in json.loads(kvdepot("config", "explain", file, "--json").output)}
    assert settings["directories"] == {"key": "directories", "value": ["/mnt/test"], "unit": "", "origin": f"{file}:5"}


def test_explain_shows_the_socket_that_tells_which_configurations_share_a_depot(kvdepot, tmp_path):
    def socket(*lines, file=tmp_path / "x.yaml"):
        file.write_text("\n".join(["pipeline: Cache", "pool_gb: 0.25", *lines]) + "\n")
        settings = {row["key"]: row for row in json.loads(kvdepot("config", "explain", file, "--json").output)}
        return settings["socket"]["value"]

    assert socket().endswith(".sock")
    assert socket("timeout_ms: 999") == socket()
    assert socket("eviction: lru") != socket()
    assert socket("socket: /run/x.sock") == "/run/x.sock"
    assert socket("share_depot: false") is None, "every engine has its own"


def test_keys(kvdepot):
    assert "lhd | s3fifo" in kvdepot("config", "keys").output
    assert json.loads(kvdepot("config", "keys", "--json").output)[0]["name"] == "pipeline"
    assert kvdepot("config", "keys", "--markdown").output.startswith("# Configuration\n")


def test_serve_passes_what_it_was_told(kvdepot, monkeypatch, tmp_path):
    served, logged = [], []
    monkeypatch.setattr(_native, "serve", lambda *given, **named: served.append((*given, *named.values())))
    monkeypatch.setattr(_native, "init_logging", lambda *arguments, **named: logged.append((*arguments, named)))
    kvdepot("serve", "--core-json", "{}", "--socket", "/s", "--idle-exit-s", 2, "--log-level", "debug")
    bounds = {"json": False, "max_bytes": 10 << 20, "max_files": 10, "burst_lines": 20}
    assert (served, logged) == ([("{}", "/s", 2000, None, False, False)], [("debug", None, bounds)])
    how = ["--log-format", "json", "--log-max-size", 0, "--log-max-files", 3, "--log-burst-lines", 7]
    kvdepot("serve", "--core-json", "{}", "--socket", "/s", "--log-file", "/l", *how)
    assert logged.pop() == ("info", "/l", {"json": True, "max_bytes": 0, "max_files": 3, "burst_lines": 7})
    del served[1:]

    file = tmp_path / "kvdepot.yaml"
    file.write_text(f"pipeline: Cache\npool_gb: 0.5\nsocket: {tmp_path}/s\nlog_level: error\n")
    kvdepot("serve", "--config", file)
    core, socket, idle_exit_ms, _, take_over, wait_for_lock = served[1]
    assert not take_over
    assert not wait_for_lock
    assert json.loads(core)["pool_bytes"] == 1 << 29
    assert (socket, idle_exit_ms) == (f"{tmp_path}/s", 0)
    assert logged[1] == ("error", None, bounds)


def test_serve_passes_the_drain_timeout(kvdepot, monkeypatch, tmp_path):
    served = []
    monkeypatch.setattr(_native, "serve", lambda core, *_, **__: served.append(json.loads(core)))
    monkeypatch.setattr(_native, "init_logging", lambda *arguments, **named: None)
    file = tmp_path / "kvdepot.yaml"
    file.write_text(f"pipeline: Cache\npool_gb: 0.5\nsocket: {tmp_path}/s\ndrain_timeout_s: 7\n")
    kvdepot("serve", "--config", file)
    kvdepot("serve", "--config", file, "--drain-timeout", 40)
    kvdepot("serve", "--core-json", "{}", "--socket", "/s", "--drain-timeout", 0)
    assert [core["drain_timeout_ms"] for core in served] == [7000, 40_000, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_ends_in_order_on_a_signal(kvdepot, monkeypatch, number):
    outcomes = []

    def serve(*_given, **_named):
        try:
            signal.raise_signal(number)
        except BaseException as error:
            outcomes.append((type(error), getattr(error, "code", None)))
            raise

    monkeypatch.setattr(_native, "serve", serve)
    monkeypatch.setattr(_native, "init_logging", lambda *arguments, **named: None)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    # The process that runs the tests may ignore some of them, as nohup does.
    signal.signal(number, signal.SIG_DFL)
    try:
        kvdepot("serve", "--core-json", "{}", "--socket", "/s", status=0)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert outcomes == [(SystemExit, 0)]


def test_serve_leaves_signals_ignored_that_nohup_ignores(kvdepot, monkeypatch):
    seen = []
    monkeypatch.setattr(_native, "serve", lambda *_, **__: seen.append(signal.getsignal(signal.SIGHUP)))
    monkeypatch.setattr(_native, "init_logging", lambda *arguments, **named: None)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        kvdepot("serve", "--core-json", "{}", "--socket", "/s")
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert seen == [signal.SIG_IGN]


def test_serve_opens_the_wire_door_as_infinistore_s_options_say(kvdepot, monkeypatch, tmp_path):
    served = []
    monkeypatch.setattr(_native, "serve", lambda *given, **named: served.append((*given, *named.values())))
    monkeypatch.setattr(_native, "init_logging", lambda *arguments, **named: None)
    file = tmp_path / "kvdepot.yaml"
    file.write_text(f"pipeline: Cache\npool_gb: 0.5\nsocket: {tmp_path}/s\n")
    common = ("serve", "--config", file)
    kvdepot(*common, "--service-port", 12345, "--prealloc-size", 0.25, "--log-level", "warning")
    core, _, _, wire, *_ = served[0]
    assert json.loads(core)["pool_bytes"] == 1 << 28
    wire = json.loads(wire)
    assert (wire["host"], wire["service_port"], wire["manage_port"]) == ("127.0.0.1", 12345, 18080)
    assert wire["value_bytes_min"] == 64 << 10
    assert wire["evict"] == {"periodic": False, "interval_ms": 5000, "min_percent": 60.0, "max_percent": 80.0}
    evict = ("--enable-periodic-evict", "--evict-interval", 1, "--evict-min-threshold", 0.5)
    kvdepot(*common, "--host", "localhost", "--minimal-allocate-size", 16, "--auto-increase", *evict)
    core, _, _, wire, *_ = served[1]
    core, wire = json.loads(core), json.loads(wire)
    assert core["pool_bytes"] == 1 << 29
    assert core["pool_bytes_max"] > core["pool_bytes"]
    assert (wire["service_port"], wire["value_bytes_min"]) == (22345, 16 << 10)
    assert wire["evict"] == {"periodic": True, "interval_ms": 1000, "min_percent": 50.0, "max_percent": 80.0}
    assert "rdma" not in wire
    kvdepot(*common, "--idle-exit-s", 3)
    assert served[2][2:] == (3000, None, False, False)
    nothing = {"device": None, "port": None, "link": None, "gid_index": None}
    for options, rdma in (
        (("--dev-name", "mlx5_1"), {"device": "mlx5_1"}),
        (("--ib-port", 2, "--link-type", "IB"), {"port": 2, "link": "IB"}),
        (("--hint-gid-index", -1), {}),
        (("--hint-gid-index", 3), {"gid_index": 3}),
    ):
        kvdepot(*common, *options)
        assert json.loads(served[-1][3])["rdma"] == nothing | rdma


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "no.such.name.invalid"), "has no address"),
        (("--host", "::1", "--evict-min-threshold", 0.9), "must be less than"),
        (("--prealloc-size", 1 << 20), "of memory"),
        (("--tls-key-file", __file__), "go together"),
    ],
)
def test_serve_refuses_a_wire_door_that_cannot_be(kvdepot, tmp_path, options, said):
    file = tmp_path / "kvdepot.yaml"
    file.write_text(f"pipeline: Cache\npool_gb: 0.5\nsocket: {tmp_path}/s\n")
    assert said in kvdepot("serve", "--config", file, *options, status=2).stderr


def test_serve_waits_for_its_turn_when_told_to(kvdepot, monkeypatch):
    served = []
    monkeypatch.setattr(_native, "serve", lambda *_, **named: served.append(named["wait_for_lock"]))
    monkeypatch.setattr(_native, "init_logging", lambda *arguments, **named: None)
    kvdepot("serve", "--core-json", "{}", "--socket", "/s", "--wait-for-lock")
    assert served == [True]
    both = ("serve", "--core-json", "{}", "--socket", "/s", "--wait-for-lock", "--take-over")
    assert "use one of them" in kvdepot(*both, status=2).stderr


def test_only_the_owner_of_a_pool_checks_its_size(kvdepot, tmp_path):
    """An engine's container may be smaller than the depot's; the depot's own machine may not."""
    file = tmp_path / "kvdepot.yaml"
    text = f"pipeline: Cache\npool_gb: 1000000\nsocket: {tmp_path}/s\n"
    file.write_text(text)
    too_large = "pool_gb: makes a pool of 1000000.0 GiB"
    with pytest.raises(ConfigError, match=too_large):
        load_config(file, owns_pool=False)
    file.write_text(text + "start_depot: false\n")
    config = load_config(file, owns_pool=False)
    assert config.socket_path() == f"{tmp_path}/s"
    assert config.depot_command(f"{tmp_path}/s") is None
    assert too_large in kvdepot("serve", "--config", file, status=2).stderr
    assert too_large in kvdepot("config", "check", file, status=2).stderr
    assert kvdepot("stat", "--config", file, status=1).stderr.startswith("error: no depot answers on ")


def test_serve_refuses_half_a_core(kvdepot):
    assert "goes with --socket" in kvdepot("serve", "--core-json", "{}", status=2).stderr


def test_stat_without_a_depot(kvdepot, tmp_path):
    result = kvdepot("stat", "--socket", tmp_path / "nobody.sock", status=1)
    assert result.stderr.startswith("error: no depot answers on ")


def test_stat_of_nested_counters():
    assert list(flat({"pool": {"bytes": 1, "blocks": 2}, "up": True})) == [
        ("pool.bytes", 1),
        ("pool.blocks", 2),
        ("up", True),
    ]
    tiers = [{"name": "posix", "servers": [{"up": False}]}, {"name": "object", "servers": []}]
    assert list(flat({"tiers": tiers, "failures": {}})) == [
        ("tiers.0.name", "posix"),
        ("tiers.0.servers.0.up", False),
        ("tiers.1.name", "object"),
        ("tiers.1.servers", None),
        ("failures", None),
    ]


def test_stat_without_a_depot_ends_at_once(kvdepot, monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "Depot", None)
    result = kvdepot("stat", "--socket", str(tmp_path / "s"), status=1)
    assert "no depot answers" in result.output


def test_stat_is_readable_and_its_json_is_as_the_depot_has_it(kvdepot, monkeypatch):
    tier = {
        "name": "remote",
        "bytes": None,
        "bytes_max": 3 << 30,
        "servers": [{"address": "10.0.0.1:22345", "up": False}],
    }
    depot = {"pool_bytes": 64 << 20, "load_bytes_hour": 7, "fetch_blocks": 2048, "pool_mlock": True, "tiers": [tier]}
    stats = {"attached": True, "depot": {**depot, "stall_max_us": 2000}}
    running = SimpleNamespace(attached=True, stats_json=lambda: json.dumps(stats), close=lambda: None)
    monkeypatch.setattr(_native, "Depot", SimpleNamespace(connect=lambda *_, **__: running))
    monkeypatch.setattr("kvdepot.cli.stat.peer_pid", lambda _: 1)
    text = kvdepot("stat", "--socket", "/s").output
    rows = dict(line.split(maxsplit=1) for line in text.replace(" \n", "\n").splitlines()[1:])
    assert {name: value.strip() for name, value in rows.items()} == {
        "attached": "yes",
        "depot.pool_bytes": "64.0 MiB",
        "depot.load_bytes_hour": "7 bytes",
        "depot.fetch_blocks": "2048",
        "depot.pool_mlock": "yes",
        "depot.tiers.0.name": "remote",
        "depot.tiers.0.bytes": "-",
        "depot.tiers.0.bytes_max": "3.0 GiB",
        "depot.tiers.0.servers.0.address": "10.0.0.1:22345",
        "depot.tiers.0.servers.0.up": "no",
        "depot.stall_max_us": "2000",
    }
    assert json.loads(kvdepot("stat", "--socket", "/s", "--json").output) == stats


def test_switches_are_yes_or_no_except_as_configuration_files_spell_them(kvdepot, tmp_path):
    assert [cell_text(one) for one in (True, False, None, [True, None, "a"])] == ["yes", "no", "-", "yes, -, a"]
    file = tmp_path / "depot.yaml"
    file.write_text("pipeline: Cache\npool_gb: 0.1\npool_mlock: true\n")
    (line,) = (one for one in kvdepot("config", "explain", file).output.splitlines() if one.startswith("pool_mlock"))
    assert line.split()[1] == "true"


def test_doctor_describes_a_machine_without_devices(kvdepot, tmp_path):
    """A machine with a GPU shows it; either way the output says so, and nothing fails."""
    report = json.loads(kvdepot("doctor", "--json").stdout)
    assert report["devices"] or report["problem"]
    assert "CUDA driver" in kvdepot("doctor").stdout


def test_copies_cannot_be_measured_without_a_device(kvdepot):
    report = json.loads(kvdepot("doctor", "--json").stdout)
    if report["devices"]:
        pytest.skip("there is a device")
    assert "CUDA driver not found" in kvdepot("bench", "copy", status=1).stderr


def test_copies_that_cannot_be_measured_are_named_with_the_reason(monkeypatch):
    from click.testing import CliRunner

    from kvdepot.cli.bench import copy

    row = {"engine": "memcpy", "op_bytes": 4096, "load_gb_per_s": 1.5}
    missing = {"engine": "gdr", "reason": "libibverbs was not found [use_gdr=true]"}
    report = {"device": {"name": "a device"}, "driver": "13.0", "note": None, "rows": [row], "missing": [missing]}
    kept = []
    monkeypatch.setattr(
        "kvdepot._native.bench_copies",
        lambda *place, **options: kept.append((*place, options)) or json.dumps(report),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    printed = CliRunner().invoke(copy, ["--device", "2", "--kernel-blocks", "16"]).output
    assert "gdr: not measured: libibverbs was not found [use_gdr=true]" in printed
    assert kept == [("2", "/somewhere/kvdepot-devices", {"smoke": False, "kernel_blocks": 16})]


def test_check_warns_of_directories_that_are_not_there(kvdepot, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    file = tmp_path / "depot.yaml"
    file.write_text(f'pipeline: "Cache|Posix"\npool_gb: 0.1\ndirectories: ["{there}", "{tmp_path / "missing"}"]\n')
    result = kvdepot("config", "check", file)
    assert result.stdout == f"{file}: valid\n"
    assert "depot.yaml:3: directories:" in result.stderr
    assert str(tmp_path / "missing") in result.stderr
    assert str(there) not in result.stderr
    assert len(json.loads(kvdepot("config", "check", file, "--json").stdout)["warnings"]) == 1


REMOTE = 'pipeline: "Cache|Remote"\npool_gb: 0.1\nremote_servers: a:1\nremote_token_file: {}\nmetrics_token_file: {}\n'


def test_check_warns_of_one_secret_for_the_pool_and_its_metrics(kvdepot, tmp_path):
    """Scrapes send it unencrypted, and with the pool's secret anyone writes blocks."""
    file, token, link, other = (tmp_path / name for name in ("depot.yaml", "token", "link", "other"))
    link.symlink_to(token)
    token.write_text("x")
    other.write_text("y")
    for metrics in (token, link):
        file.write_text(REMOTE.format(token, metrics))
        result = kvdepot("config", "check", file)
        assert f"warning: {file}:5: metrics_token_file: {metrics} is also the remote_token_file" in result.stderr
        assert result.stdout == f"{file}: valid\n"
    file.write_text(REMOTE.format(token, other))
    assert kvdepot("config", "check", file).stderr == ""


def test_check_names_what_a_depot_would_not_start_without(kvdepot, tmp_path):
    file, missing = tmp_path / "depot.yaml", tmp_path / "missing"
    slab = f"slab_path: {missing}/medium\nslab_capacity_gb: 1\n"
    file.write_text(REMOTE.format(missing / "pool", missing / "metrics").replace("Remote", "Remote|Slab|Dax") + slab)
    with file.open("a") as opened:
        opened.write(f"dax_device_path: {missing}/dax\n")
    said = json.loads(kvdepot("config", "check", file, "--json").stdout)
    assert said["ok"]
    assert [one.split(": ")[:3] for one in said["warnings"]] == [
        [f"{file}:6", "slab_path", f"{missing} is not there"],
        [f"{file}:8", "dax_device_path", f"{missing}/dax is not there"],
        [f"{file}:4", "remote_token_file", f"{missing}/pool is not there"],
        [f"{file}:5", "metrics_token_file", f"{missing}/metrics is not there"],
    ]


@pytest.mark.parametrize(("segment_mb", "table_pages"), [(1, 16), (256, 321)])
def test_check_knows_the_smallest_slab_medium_of_the_core(kvdepot, tmp_path, segment_mb, table_pages):
    file, path = tmp_path / "depot.yaml", tmp_path / "medium"
    smallest = 3 * (segment_mb << 20) + 2 * 4096 * (1 + table_pages)
    for size, status in ((smallest, 0), (smallest - 1, 2)):
        with path.open("wb") as medium:
            medium.truncate(size)
        with contextlib.nullcontext() if status == 0 else pytest.raises(ConfigError, match="three segments"):
            _native.inspect_medium("Slab", json.dumps({"path": str(path), "segment_mb": segment_mb}))
        keys = f"slab_path: {path}\nslab_segment_mb: {segment_mb}\nslab_capacity_gb: {size / (1 << 30)!r}\n"
        file.write_text(f"pipeline: Cache|Slab\npool_gb: 0.1\n{keys}")
        said = kvdepot("config", "check", file, status=status).stderr
        assert said == "" if status == 0 else f"{file}:5: slab_capacity_gb" in said


def test_serve_warns_of_one_secret_for_blocks_and_metrics(kvdepot, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr("kvdepot._native.serve", lambda *_, **__: served.append(True))
    monkeypatch.setattr("kvdepot._native.init_logging", lambda *_, **__: None)
    file, token, other = (tmp_path / name for name in ("depot.yaml", "token", "other"))
    token.write_text("x")
    other.write_text("y")
    file.write_text(REMOTE.format(token, other))
    serve = ("serve", "--config", file, "--socket", tmp_path / "s")
    assert kvdepot(*serve).stderr == ""
    said = kvdepot(*serve, "--metrics-token-file", token).stderr
    assert said.startswith(f"warning: metrics_token_file: {token} is also the remote_token_file")
    assert "is also the --token-file" in kvdepot(*serve, "--service-port", 0, "--token-file", other).stderr
    assert kvdepot(*serve, "--service-port", 0, "--token-file", token).stderr == ""
    assert len(served) == 4


def test_check_names_mistakes_of_every_kind_in_one_pass(kvdepot, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text('pol_gb: 1\npool_gb: 2gb\nhit_ratio: 3\npipeline: "Cache|Posx"\nload_policy: deadline\n')
    lines = kvdepot("config", "check", file, status=2).stderr.splitlines()
    assert [line.split(":")[2] for line in lines] == ["1", "2", "3", "4", "5"], lines


def test_a_rule_about_a_value_that_is_wrong_is_not_added(kvdepot, tmp_path):
    """The value was left out, so the rule would refer to a default."""
    file = tmp_path / "wrong.yaml"
    file.write_text("load_policy: deadline\nload_deadline_ms: soon\n")
    (line,) = kvdepot("config", "check", file, status=2).stderr.splitlines()
    assert "load_deadline_ms" in line
    assert "must be" in line
