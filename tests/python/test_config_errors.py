"""P10: every mistake is an error that names file, key, value and what to do."""

import json

import pytest

from kvdepot.config import load_config, load_engine_config
from kvdepot.errors import ConfigError

MINIMAL = """\
ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Posix"
      storage_backends: "/mnt/test"
"""


def errors_of(text, machine, tmp_path):
    file = tmp_path / "kvdepot.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, machine=machine)
    assert caught.value.kind == "config"
    lines = str(caught.value).splitlines()
    assert all(line.startswith(str(file)) for line in lines), lines
    return [line.removeprefix(str(file)) for line in lines]


FLAT = [
    # unknown keys and the nearest known one
    ("pipelin: x", ":1: pipelin: unknown key: did you mean pipeline?"),
    ("zzzzz: 1", ":1: zzzzz: unknown key: `kvdepot config keys` lists the known ones"),
    ("cache_buffer_capacity_gb: 1", "it is spelled pool_gb"),
    ("ucm_connector: []", "did you mean ucm_connectors?"),
    # types
    ("timeout_ms: '5'", ":1: timeout_ms: must be a valid integer, got '5'"),
    ("timeout_ms: 1.5", "must be a valid integer, got 1.5"),
    ("timeout_ms: true", "must be a valid integer, got True"),
    ("io_direct: 2", "io_direct: must be True, False or 'auto', got 2"),
    ("io_direct: 'yes'", "io_direct: must be True, False or 'auto', got 'yes'"),
    ("pool_gb: 10GB", "pool_gb: must be a valid number, got '10GB'"),
    ("directories: {a: 1}", "directories: must be a valid tuple"),
    ("directories: [1]", "directories: must be a valid string, got [1]"),
    ("pipeline: [Cache, Posix]", "pipeline: must be a valid string"),
    # ranges and units
    ("pool_gb: -1", "pool_gb: must be greater than 0, got -1"),
    ("pool_gb: 0", "pool_gb: must be greater than 0"),
    ("pool_gb: .nan", "pool_gb: must be a finite number"),
    ("pool_gb: .inf", "pool_gb: must be a finite number"),
    ("pool_gb: 0.0000001", "the unit is GiB"),
    ("pool_numa: near", "pool_numa: must be auto, interleave or a list of NUMA nodes such as 0,2-3"),
    ("pool_numa: 0;1", "pool_numa: must be auto, interleave"),
    ("pool_mlock: maybe", "pool_mlock: must be"),
    ("pool_populate_threads: 65", "pool_populate_threads: must be"),
    ("pool_gb: 1025", "pool_gb: makes a pool of 1025.0 GiB, but there are 1024.0 GiB of memory"),
    ("posix_capacity_gb: -5", "posix_capacity_gb: must be greater than or equal to 0, got -5"),
    ("timeout_ms: 0", "timeout_ms: must be greater than or equal to 1"),
    ("timeout_ms: 100000000", "timeout_ms: must be less than or equal to 3600000"),
    ("hit_ratio: 80", "hit_ratio: must be less than or equal to 1, got 80"),
    ("waiting_queue_depth: 0", "waiting_queue_depth: must be greater than or equal to 1"),
    ("eviction: lfu", "eviction: must be 'lhd', 's3fifo' or 'lru', got 'lfu'"),
    # placements
    (
        "posix_write: later",
        "posix_write: must be 'through', 'on_second_use', 'when_cold' or 'on_demotion', got 'later'",
    ),
    ("posix_write: on_demotion", "posix_write: there is no tier above Posix in Cache|Posix"),
    ("{pipeline: Posix, pool_gb: 1, posix_write: when_cold}", "posix_write: a Staging pool keeps nothing"),
    ("posix_promote: true", "posix_promote: there is no tier below Posix in Cache|Posix: remove it"),
    ("remote_write: when_cold", "remote_write: has no use in the pipeline Cache|Posix, which has no Remote tier"),
    # pipelines
    ("pipeline: Cash|Posix", "a pipeline begins with its pool, but 'Cash' is not one: did you mean Cache?"),
    ("pipeline: Posix|Fake", "a pipeline begins with its pool, but 'Posix' is not one"),
    ("pipeline: Cache|Staging|Posix", "Staging is a pool: name one pool, first"),
    ("pipeline: Cache|", "'' is not a tier"),
    ("pipeline: Cache|Posiks", "'Posiks' is not a tier: did you mean Posix?"),
    ("pipeline: Cache|Posix|Posix", "the tier Posix is named twice"),
    ("pipeline: Staging", "needs a tier"),
    ("pipeline: ''", "a pipeline begins with its pool"),
    # rules between keys
    ("pipeline: Cache\ndirectories: /a", ":2: directories: has no use in the pipeline Cache"),
    ("directories: a/b", "'a/b' must be an absolute path"),
    ("directories: ''", "must be an absolute path"),
    ("directories: []", "must be 1 to 255 directories, got []"),
    ("directories: /a:/a", "is listed twice"),
    (
        "directories: [a, b]",
        "directories: 'a' must be an absolute path, because the depot is its own process; 'b' must",
    ),
    ("io_read_threads: 513", "io_read_threads: must be less than or equal to 512, got 513"),
    ("posix_capacity_gb: 2000000000", "posix_capacity_gb: must be less than or equal to 1073741824"),
    ("pool_slots: 5", "only a Staging pool is sized in blocks"),
    ("pipeline: Staging|Posix\npool_slots: 5\npool_gb: 1", ":2: pool_slots: the pool's size is also set by pool_gb"),
    ("socket: kv.sock", "must be an absolute path"),
    (f"socket: /{'x' * 107}", "at most 107 bytes"),
    ("socket: /a\nshare_depot: false", "cannot share a socket"),
    ("socket: /a\nmode: embedded", "an embedded depot has no socket"),
    ("metrics_host: localhost", ":1: metrics_host: must be an IP address"),
    ("metrics_host: fe80::1%eth0", ":1: metrics_host: must be an IP address"),
    ("metrics_token_file: token", ":1: metrics_token_file: must be an absolute path"),
    ("load_policy: deadline", "needs load_deadline_ms"),
    ("load_deadline_ms: 5", "has no use with load_policy faster"),
    ("load_policy: deadline\nload_deadline_ms: 31000", "must not be more than timeout_ms"),
    ("start_depot: false\nshare_depot: false", ":1: start_depot: no other process starts an engine's own depot"),
    ("start_depot: false\nmode: embedded", ":1: start_depot: an embedded depot is a part of this process"),
    ("use_layerwise: sometimes", ":1: use_layerwise: must be True, False or 'auto'"),
    ("pipeline: Cache|Remote", "its Remote tier needs servers: add remote_servers"),
    ("remote_servers: a:1", "remote_servers: has no use in the pipeline Cache|Posix"),
    ("pipeline: Cache|Remote\nremote_servers: a", "'a' must be written host:port"),
    ("pipeline: Cache|Remote\nremote_servers: [a:1, b:0]", "'b:0' must be written host:port"),
    ("pipeline: Cache|Remote\nremote_servers: a:1,a:1", "names a server twice"),
    ("pipeline: Cache|Remote\nremote_servers: []", "must name 1 to 64 servers"),
    ("pipeline: Cache|Remote\nremote_servers: a:1\nremote_connections: 0", "greater than or equal to 1"),
    ("pipeline: Cache|Remote\nremote_servers: a:1\nremote_token_file: t", "must be an absolute path"),
    (
        "pipeline: Cache|Remote\nremote_servers: a:1\nremote_token_file: /t\nremote_protocol: infinistore",
        "knows no secret",
    ),
    ("pipeline: Cache|Remote\nremote_servers: a:1\nremote_tls_ca_file: t", "must be an absolute path"),
    ("pipeline: Cache|Remote\nremote_servers: a:1\nremote_tls_server_name: a", "add remote_tls_ca_file"),
    ("remote_tls_ca_file: /t", "has no use in the pipeline Cache|Posix"),
    ("pipeline: Cache|Remote\nremote_servers: a:1\nremote_token: x", "did you mean remote_token_file?"),
    ("pipeline: Cache|Slab", "its Slab tier needs a file or a block device: add slab_path"),
    ("pipeline: Cache|Slab\nslab_path: relative", "must be an absolute path"),
    ("pipeline: Cache|Slab\nslab_path: /s\nslab_segment_mb: 0", "slab_segment_mb"),
    ("slab_path: /s", "has no use in the pipeline Cache|Posix"),
    # planned features
    (
        "copy_engine: batch\ncopy_engines_forbidden: [batch]",
        "copy_engine: is forbidden by copy_engines_forbidden: write auto, or allow it there, got 'batch'",
    ),
    (
        "use_gdr: true\ncopy_engines_forbidden: [gdr]",
        "use_gdr: gdr is forbidden by copy_engines_forbidden: write false, or allow it there, got True",
    ),
    ("use_gdr: maybe", "use_gdr: must be True, False or 'auto', got 'maybe'"),
    ("trace_directory: traces", "trace_directory: must be an absolute path"),
    ("trace_files: 0", "greater than or equal to 1"),
    ("io_engine: uring", "must be 'psync', 'aio', 'io_uring' or 'auto', got 'uring'"),
    ("pipeline: Cache|Object", "its Object tier needs a bucket: add object_url"),
    ("pipeline: Cache|Object\nobject_url: bucket", "object_url: must be a URL that begins with s3://"),
    ("pipeline: Cache|Object\nobject_url: s3://b\nobject_endpoint: host:9000", "begins with https:// or http://"),
    ("pipeline: Cache|Object\nobject_url: s3://b\nobject_tls_ca_file: /c", "add object_endpoint"),
    ("pipeline: Cache|Object\nobject_url: s3://b\nobject_part_mb: 4", "greater than or equal to 5"),
    ("object_url: s3://b", "has no use in the pipeline Cache|Posix"),
    ("pipeline: Cache|Object\nobject_url: gs://b@c", "holds no user, query or fragment"),
    ("pipeline: Cache|Object\nobject_url: abfss://c:p@a.dfs.core.windows.net/kv", "holds no user, query or fragment"),
    ("pipeline: Cache|Object\nobject_url: gs://b\nobject_region: r", "object_region: has no use unless object_url"),
    ("pipeline: Cache|Object\nobject_url: az://c\nobject_profile: p", "object_profile: has no use unless object_url"),
    # not a configuration
    ("", ": is empty"),
    ("# only a comment\n", ": is empty"),
    ("a: [", ":1: is not valid YAML"),
    ("\tpool_gb: 1", ":1: is not valid YAML"),
    ("just text", ": must be a mapping of keys to values, but is a str"),
    ("- a", ": must be a mapping of keys to values, but is a list"),
    ("pool_gb: 1\npool_gb: 2", ":2: pool_gb: is written twice, first in line 1"),
    ("? [a, b]\n: 1", "keys must be plain names"),
    ("base: &b {pool_gb: 1}\n<<: *b", "keys must be plain names"),
    ("a: !!python/object:os.system x", "is not valid YAML"),
    ("--- {pool_gb: 1}\n--- {pool_gb: 2}", "is not valid YAML"),
    ("a: " + "[" * 5000, "is not valid YAML"),
]


@pytest.mark.parametrize(("text", "expected"), FLAT, ids=[text[:40] for text, _ in FLAT])
def test_flat_spelling(text, expected, machine, tmp_path):
    (line,) = errors_of(text, machine, tmp_path)
    assert expected in line


@pytest.mark.parametrize("endpoint", ["http://user:geheim@host", "http://user:ge'h/eim@host", "https://geheim@host"])
def test_an_error_shows_no_password(endpoint, machine, tmp_path):
    object_tier = "pipeline: Cache|Object\nobject_url: s3://b\n"
    (line,) = errors_of(f"{object_tier}object_endpoint: {json.dumps(endpoint)}", machine, tmp_path)
    assert "holds no user" in line
    assert "://…@host" in line
    assert "eim" not in line


def seed(replace, by, extra=""):
    assert replace in MINIMAL
    return MINIMAL.replace(replace, by) + extra


CONFIG = "ucm_connectors[0].ucm_connector_config"
SEEDS = [
    (seed("UcmPipelineStore", "UcmPipelinStore"), ":2: ucm_connectors[0].ucm_connector_name: no known store"),
    (seed("UcmPipelineStore", "UcmPipelinStore"), "did you mean UcmPipelineStore?"),
    (seed('store_pipeline: "Cache|Posix"', "io_direct: false"), "store_pipeline: UcmPipelineStore needs it"),
    (seed('storage_backends: "/mnt/test"', "io_direct: false"), "storage_backends: UcmPipelineStore needs it"),
    (
        seed('storage_backends: "/mnt/test"', "storage_backends:"),
        f":5: {CONFIG}.storage_backends: UcmPipelineStore needs",
    ),
    (MINIMAL + "      io_dirct: true\n", f":6: {CONFIG}.io_dirct: unknown key: did you mean io_direct?"),
    (MINIMAL + "      stream_number: 8\n", f":6: {CONFIG}.stream_number: is a key of UcmNfsStore only"),
    (MINIMAL + "      use_layerwise: true\n", f":6: {CONFIG}.use_layerwise: is in the wrong place"),
    (MINIMAL + "io_direct: true\n", ":6: io_direct: is in the wrong place"),
    (MINIMAL + "use_layrwise: true\n", ":6: use_layrwise: unknown key: did you mean use_layerwise?"),
    (MINIMAL + "eviction: lru\n", ":6: eviction: is of kvdepot's own spelling"),
    (MINIMAL + "      timeout_ms: soon\n", f":6: {CONFIG}.timeout_ms: must be a valid integer, got 'soon'"),
    (
        MINIMAL + "      cache_buffer_capacity_gb: -1\n",
        f":6: {CONFIG}.cache_buffer_capacity_gb: must be greater than 0",
    ),
    (
        MINIMAL + "      cache_buffer_capacity_gb: 2000\n",
        f":6: {CONFIG}.cache_buffer_capacity_gb: makes a pool of 2000",
    ),
    (MINIMAL + "      posix_io_engine: libaio\n", f":6: {CONFIG}.posix_io_engine: must be 'psync', 'aio'"),
    (MINIMAL + "      storage_backends: /b\n", f":6: {CONFIG}.storage_backends: is written twice, first in line 5"),
    (
        seed("Cache|Posix", "Cache|Posix|Object"),
        f":4: {CONFIG}.store_pipeline: its Object tier needs a bucket",
    ),
    (MINIMAL + "    ucm_connector_module_path: my.store\n", "loads no other module: remove the key, got 'my.store'"),
    (MINIMAL + "    ucm_connector_nam: x\n", ":6: ucm_connectors[0].ucm_connector_nam: unknown key"),
    (MINIMAL + "  - ucm_connector_name: x\n", ":1: ucm_connectors: must be a list with exactly one connector, got 2"),
    ("ucm_connectors: []", "exactly one connector, got 0 entries"),
    ("ucm_connectors: {}", "exactly one connector, got dict"),
    ("ucm_connectors: [5]", "must be a mapping with ucm_connector_name"),
    ("ucm_connectors:\n  - ucm_connector_name: UcmNfsStore\n", "ucm_connector_config: must be a mapping with at least"),
    ("ucm_connectors:\n  - ucm_connector_name: [x]\n", "ucm_connector_name: no known store"),
]


@pytest.mark.parametrize(("text", "expected"), SEEDS, ids=[expected[:50] for _, expected in SEEDS])
def test_seeds_spelling(text, expected, machine, tmp_path):
    (line,) = errors_of(text, machine, tmp_path)
    assert expected in line


def test_nfs_store_needs_directories_and_has_its_own_keys(machine, tmp_path):
    text = "ucm_connectors:\n  - ucm_connector_name: UcmNfsStore\n    ucm_connector_config: {posix_capacity_gb: 1}\n"
    lines = errors_of(text, machine, tmp_path)
    assert len(lines) == 2
    assert "storage_backends: UcmNfsStore needs it" in lines[0]
    assert "posix_capacity_gb: is a key of UcmPipelineStore only" in lines[1]


def test_all_mistakes_are_told_at_once(machine, tmp_path):
    lines = errors_of("pool_gb: -1\ntimeout_ms: x\nio_direct: 3\n", machine, tmp_path)
    assert [line.split(": ")[1] for line in lines] == ["timeout_ms", "pool_gb", "io_direct"]


def test_files_that_cannot_be_read(machine, tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load_config(tmp_path / "missing.yaml", machine=machine)
    with pytest.raises(ConfigError, match="cannot read the configuration: Is a directory"):
        load_config(tmp_path, machine=machine)
    (tmp_path / "latin.yaml").write_bytes(b"pool_gb: 1 # \xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin.yaml", machine=machine)
    (tmp_path / "long.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="at most"):
        load_config(tmp_path / "long.yaml", machine=machine)


def test_a_dict_has_no_file_to_name(machine):
    with pytest.raises(ConfigError, match=r"^configuration: pool_gb: must be greater than 0, got -1$"):
        load_config({"pool_gb": -1}, machine=machine)


def test_keys_of_a_dict_must_be_text(machine):
    with pytest.raises(ConfigError, match="unknown key"):
        load_config({1: 2}, machine=machine)


def test_lite_mode_simulates_pools_of_any_size(machine):
    """It has none: it can be asked what a larger machine would bring."""
    keys = {"pipeline": "Cache", "pool_gb": 1025}
    assert load_config({**keys, "use_lite": True}, machine=machine).pool_gb == 1025
    with pytest.raises(ConfigError, match=r"pool_gb: makes a pool of 1025\.0 GiB"):
        load_config(keys, machine=machine)


def test_a_pool_of_blocks_may_not_exceed_memory(machine):
    config = load_config({"pipeline": "Staging|Posix", "pool_slots": 1 << 20}, machine=machine)
    with pytest.raises(ConfigError, match=r"pool_slots: makes a pool of 2048\.0 GiB"):
        config.to_core_json(block_bytes=2 << 20, machine=machine)


def test_remote_servers_reach_the_core(machine, tmp_path):
    file = tmp_path / "remote.yaml"
    file.write_text("pipeline: Cache|Remote|Posix\nremote_servers: 'a:1, [::1]:2'\nremote_timeout_ms: 500\n")
    core = json.loads(load_config(file, machine=machine).to_core_json(machine=machine))
    assert core["pipeline"] == "Cache|Remote|Posix"
    assert core["remote"] == {
        "servers": ["a:1", "[::1]:2"],
        "token_file": None,
        "tls_ca_file": None,
        "tls_server_name": None,
        "timeout_ms": 500,
        "connections": 4,
        "protocol": "auto",
    }


def test_an_engine_names_a_file_or_keys(tmp_path):
    file = tmp_path / "kvdepot.yaml"
    file.write_text("pool_gb: 2\n")
    assert load_engine_config({"config": str(file)}).pool_gb == load_engine_config({"pool_gb": 2}).pool_gb == 2
    with pytest.raises(ConfigError, match=r"^config: names a file, but there are other keys, too: mode, pool_gb$"):
        load_engine_config({"config": str(file), "pool_gb": 1, "mode": "node"})
    with pytest.raises(ConfigError, match=r"^config: must be the name of a file, got 7$"):
        load_engine_config({"config": 7})


@pytest.mark.parametrize("key", ["socket", "metrics_token_file", "trace_directory", "metrics_config_path"])
def test_a_tilde_is_the_users_home(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config({key: "~/x"}, owns_pool=False).model_dump()[key] == "/home/me/x"
