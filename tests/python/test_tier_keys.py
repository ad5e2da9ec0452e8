"""Every setting of a tier in the core is a key here, without a line of Python for it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvdepot
import kvdepot.config
from kvdepot import _native
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.reference import reference_markdown
from kvdepot.config.seeds import STORES
from kvdepot.errors import ConfigError

TABLE = json.loads(_native.tier_table())
KEYED = [(tier, setting) for tier in TABLE["tiers"] for setting in tier["settings"] if setting["key"]]
ALL_TIERS = {
    "pipeline": "Cache|Slab|Remote|Dax|Object|Mooncake|Posix",
    "remote_servers": ["a:1"],
    "dax_device_path": "/dev/dax0.0",
    "slab_path": "/slab",
    "object_url": "s3://bucket",
}
OTHERS = {"path": "/some/file", "paths": ["/some/where"], "servers": ["b:2"], "text": "some"}
KEYS = pytest.mark.parametrize(("tier", "setting"), KEYED, ids=[setting["key"]["name"] for _, setting in KEYED])


def other_than_the_default(setting):
    """Returns a valid value of a key that is not its default."""
    kind, default = setting["kind"], setting["key"]["default"]
    if kind["is"] == "bool":
        return not default
    if kind["is"] == "switch":
        return default == "auto"
    if kind["is"] == "whole":
        return kind["max"] if default != kind["max"] else kind["min"]
    if kind["is"] == "bytes":
        return kind["max"] >> 31
    if kind["is"] == "choice":
        accepted = setting["key"]["only"] or kind["of"]
        return accepted[-1]
    if kind["is"] == "url":
        return f"{kind['of'][0]}://other"
    return OTHERS[kind["is"]]


def beside(setting):
    """Returns the other settings that a key needs."""
    rule = setting["key"]["rule"]
    if rule and rule["is"] == "needs":
        (needed,) = (other for _, other in KEYED if other["key"]["name"] == rule["key"])
        return {rule["key"]: other_than_the_default(needed)}
    return {}


def test_there_are_keys_of_several_tiers():
    assert len(KEYED) > 15
    assert len({tier["name"] for tier, _ in KEYED}) >= 2


@KEYS
def test_every_key_is_accepted_and_reaches_the_core(tier, setting, machine):
    value = other_than_the_default(setting)
    config = load_config(ALL_TIERS | beside(setting) | {setting["key"]["name"]: value}, machine=machine)
    told = json.loads(config.to_core_json(machine=machine))[tier["section"]][setting["name"]]
    assert told == (value << 30 if setting["kind"]["is"] == "bytes" else value)
    assert setting["key"]["name"] in {one.key for one in config.effective(machine)}


@pytest.mark.parametrize(
    "url", ["s3://b/kv", "gs://b/kv", "az://c/kv", "azure://c", "abfss://c@a.dfs.core.windows.net/kv"]
)
def test_buckets_of_all_providers_are_accepted(url, machine):
    config = load_config({"pipeline": "Cache|Object", "object_url": url}, machine=machine)
    assert json.loads(config.to_core_json(machine=machine))["object"]["url"] == url


@KEYS
def test_every_default_is_told_to_the_core(tier, setting, machine):
    told = json.loads(load_config(ALL_TIERS, machine=machine).to_core_json(machine=machine))
    default = setting["key"]["default"]
    if default is not None:
        assert told[tier["section"]][setting["name"]] == default


@KEYS
def test_every_key_is_checked(tier, setting, machine):
    kind = setting["kind"]
    wrong = [{"a": 1}, 0.5 if kind["is"] != "bytes" else "1"]
    if kind["is"] in ("whole", "bytes"):
        wrong += [kind["max"] + 1, kind.get("min", 0) - 1]
    for value in wrong:
        said = ALL_TIERS | beside(setting) | {setting["key"]["name"]: value}
        with pytest.raises(ConfigError, match=f"configuration: {setting['key']['name']}: .*, got "):
            load_config(said, machine=machine)


@KEYS
def test_every_key_is_documented(tier, setting):
    key = setting["key"]
    row = next(line for line in reference_markdown().splitlines() if line.startswith(f"| `{key['name']}` |"))
    assert key["meaning"].replace("|", "\\|") in row
    assert key["unit"] in row
    (known,) = (one for one in KVDepotConfig.key_table() if one.name == key["name"])
    assert (known.meaning, known.default, known.facts.unit) == (key["meaning"], key["default"], key["unit"])


def test_what_users_have_no_key_for_is_unknown(machine):
    names = {key.name for key in KVDepotConfig.key_table()}
    for tier in TABLE["tiers"]:
        for setting in tier["settings"]:
            if not setting["key"]:
                assert f"{tier['section']}_{setting['name']}" not in names
        assert (f"{tier['section']}_write" in names) == tier["for_users"]


def test_configuration_is_written_without_knowing_a_tiers_keys():
    """Strings, attributes, arguments and fields; keys of files with ``ucm_connectors`` that have the same name are
    theirs."""
    foreign = {name for names in STORES.values() for name in names}
    keys = {setting["key"]["name"] for _, setting in KEYED}
    files = sorted(Path(kvdepot.config.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        hidden = foreign if file.name == "seeds.py" else set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            named = {
                ast.Constant: lambda node: node.value,
                ast.Attribute: lambda node: node.attr,
                ast.keyword: lambda node: node.arg,
                ast.AnnAssign: lambda node: getattr(node.target, "id", None),
            }.get(type(node), lambda _: None)(node)
            assert not (isinstance(named, str) and named in keys - hidden), f"{file.name}:{node.lineno}: {named}"


PLANTED = {
    "name": "Attic",
    "section": "attic",
    "for_users": True,
    "settings": [
        {"name": "create", "kind": {"is": "bool"}, "key": None},
        *(
            {
                "name": name,
                "kind": kind,
                "key": {
                    "name": f"attic_{name}",
                    "meaning": f"Which {name} the attic has.",
                    "unit": "",
                    "default": None,
                    "by_default": "none",
                    "by_machine": None,
                    "example": "",
                    "seeds": [],
                    "half_of_seed": "",
                    "only": [],
                    "instead": "",
                    "required": "",
                    "rule": None,
                    "came_later": False,
                    **more,
                },
            }
            for name, kind, more in (
                ("rooms", {"is": "paths", "max": 3}, {"by_machine": {"is": "cache_directory", "tell": "create"}}),
                ("room", {"is": "bytes", "max": 1 << 40}, {"unit": "GiB", "required": "the attic needs room"}),
                ("dust", {"is": "choice", "of": ["much", "little"]}, {"default": "much"}),
                ("shelves", {"is": "whole", "min": 1, "max": 9}, {"default": 3, "seeds": ["shelf_number"]}),
            )
        ),
    ],
}
CHILD = """
import json, sys
from kvdepot import _native
table = json.loads(_native.tier_table())
table["tiers"].append(json.load(sys.stdin))
_native.tier_table = lambda: json.dumps(table)

from kvdepot.config import Machine, load_config
from kvdepot.config.reference import reference_markdown
from kvdepot.errors import ConfigError

machine = Machine(memory_bytes=1 << 40, environ={"HOME": "/home/somebody"})
def problem(**said):
    try:
        load_config(said, machine=machine)
    except ConfigError as error:
        return str(error)
attic = {"pipeline": "Cache|Attic", "attic_room": 2.5}
config = load_config(attic | {"attic_dust": "little", "attic_write": "when_cold"}, machine=machine)
core = json.loads(config.to_core_json(machine=machine))
assert core["attic"] == {
    "rooms": ["/home/somebody/.cache/kvdepot"], "create": True, "room": 5 << 29, "dust": "little", "shelves": 3
}, core
assert core["placement"] == {"Attic": {"write": "when_cold", "promote": False}}, core
config = load_config(attic | {"attic_rooms": "/a:~/b"}, machine=machine)
assert json.loads(config.to_core_json(machine=machine))["attic"]["create"] is False
print(problem(pipeline="Cache|Attic"))
print(problem(**attic, attic_shelves=10))
print(problem(**attic, attic_dust="some"))
print(problem(**attic, attic_rooms=["a", "/b"]))
print(problem(attic_shelves=3))
print(problem(**attic, attic_shelf=3))
print(problem(**attic, shelf_number=3))
print(next(line for line in reference_markdown().splitlines() if "`attic_dust`" in line))
"""


def test_a_tier_that_the_core_adds_is_configured_without_a_line_here():
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(PLANTED), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    wanted = [
        "configuration: pipeline: the attic needs room, got 'Cache|Attic'",
        "configuration: attic_shelves: must be less than or equal to 9, got 10",
        "configuration: attic_dust: must be 'much' or 'little', got 'some'",
        (
            "configuration: attic_rooms: 'a' must be an absolute path, because the depot is its own process, "
            "got ['a', '/b']"
        ),
        (
            "configuration: attic_shelves: has no use in the pipeline Cache|Posix, which has no Attic tier: remove it, "
            "got 3"
        ),
        "configuration: attic_shelf: unknown key: did you mean attic_shelves?",
        "configuration: shelf_number: unknown key: outside of ucm_connector_config it is spelled attic_shelves",
        "| `attic_dust` | much \\| little | `much` |  | Which dust the attic has. |",
    ]
    assert done.stdout.splitlines() == wanted


def test_a_slab_file_keeps_its_size_without_a_capacity(tmp_path):
    """A size that no key gives is left to the tier: the length of the file, and an error for a new one."""
    slab = {"pipeline": "Cache|Slab", "slab_path": str(tmp_path / "slab"), "slab_segment_mb": 1, "pool_gb": 0.0625}
    block, layout = [np.arange(4096, dtype=np.uint8)], [4096]
    with pytest.raises(ConfigError, match="capacity"):
        kvdepot.open(slab, layout=layout, namespace={"model": "tiny"})
    with kvdepot.open({**slab, "slab_capacity_gb": 0.0625}, layout=layout, namespace={"model": "tiny"}) as store:
        store.dump([b"block"], [block]).wait().raise_for_failures()
        assert store.drain(60_000)
    with kvdepot.open(slab, layout=layout, namespace={"model": "tiny"}) as store:
        assert store.lookup([b"block"]).all()
    assert (tmp_path / "slab").stat().st_size == 64 << 20
