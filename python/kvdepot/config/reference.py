"""Generates ``docs/configuration.md`` from the table of keys, for ``kvdepot config keys --markdown``."""

from collections.abc import Collection, Mapping

from kvdepot.config import seeds
from kvdepot.config.keys import Key
from kvdepot.config.model import SECTIONS, KVDepotConfig
from kvdepot.config.tier_table import TIERS
from kvdepot.config.variables import PREFIX, variable_of

_HEAD = """\
# Configuration

<!-- Written by `kvdepot config keys --markdown` from the table of keys; a test compares them. -->

A configuration is one YAML file, or a dict with the same keys. The file is optional: every key has a default, and
kvdepot then derives sizes from the machine. An unknown key is an error that suggests the closest known key.
`kvdepot config check FILE` reports every mistake. `kvdepot config explain FILE` shows the effective values on this
machine and where each one comes from.

```yaml
pipeline: "Cache|Posix"
pool_gb: 64
{example}
```

Sizes in GiB (2^30 bytes) may be fractions. Paths are absolute; `~` is the user's home.
"""

_SEEDS_HEAD = """\
## Files with `ucm_connectors`

Files in this spelling are read unchanged. Keys of the two spellings do not mix in one file.

```yaml
ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Posix"
      storage_backends: "/mnt/test"
use_layerwise: true
```
"""

_ENVIRONMENT = """\
## Environment

Every key has a variable: `{prefix}` and its name in capitals, such as {examples}.
A command's options override variables, variables override the file, and the file overrides the defaults. A dict that
a program passes overrides variables, too. Values are written as in a file, lists with commas, `{paths}` with colons.
Empty variables are ignored. So are variables of a tier that is not in the pipeline of a dict, and all variables if
`kvdepot serve` has the option `--core-json`. `kvdepot config explain FILE` shows which values come from the
environment, and `kvdepot config check FILE` warns of variables with this prefix that belong to no key. The variables
below override the key's own variable.

| variable | meaning |
| --- | --- |
| `KVDEPOT_LOG`, then `UC_LOGGER_LEVEL` | overrides `log_level`; same levels |
| `UCM_LOG_MAX_SIZE` | overrides `log_max_size_mb` and `trace_file_mb`; MiB, or bytes from 1048576 on; 0 = no limit |
| `UCM_LOG_MAX_FILES` | overrides `log_max_files` and `trace_files`; 0 counts as 1 |
| `XDG_CACHE_HOME` | parent of the default directory of the `Posix` tier; `~/.cache` if not set |
| `XDG_RUNTIME_DIR` | directory of the depot's socket; `/tmp/kvdepot-UID` if not set |
"""


def reference_markdown() -> str:
    """Returns the complete page."""
    parts = [_HEAD.format(example="\n".join(_example()))]
    by_name = {key.name: key for key in KVDepotConfig.key_table()}
    for title, keys in SECTIONS:
        rows = [_row(by_name[name]) for name in keys]
        parts.append(_table(title, ["key", "type", "default", "unit", "meaning"], rows))
    parts.append(_SEEDS_HEAD)
    names = {seed: key for key in KVDepotConfig.key_table() for seed in key.facts.seeds}
    for store, store_keys in seeds.STORES.items():
        rows = [_seed_row(seed, names[seed], seeds.REQUIRED[store], seeds.STORE_DEFAULTS) for seed in store_keys]
        parts.append(_table(f"`ucm_connector_config` of `{store}`", ["key", "kvdepot key", "default"], rows, level=3))
    rows = [_seed_row(seed, names[seed], (), seeds.TOP_DEFAULTS) for seed in seeds.TOP_LEVEL]
    parts.append(_table("Top level", ["key", "kvdepot key", "default"], rows, level=3))
    parts.append(
        "`UcmNfsStore` is the pipeline `Staging|Posix`. `ucm_connector_module_path` may name the store's own module\n"
        "and changes nothing.\n"
    )
    parts.append(_environment())
    return "\n".join(parts)


def _environment() -> str:
    keys = KVDepotConfig.key_table()
    examples = ", ".join(f"`{variable_of(key.name)}`" for key in keys[:: len(keys) // 4][:4])
    paths = next(key.name for key in keys if key.type == "list of paths")
    return _ENVIRONMENT.format(prefix=PREFIX, examples=examples, paths=paths)


def _example() -> list[str]:
    return [f"{key.name}: {key.example}" for tier in TIERS for _, key in tier.keyed if key.example]


def _table(title: str, columns: list[str], rows: list[list[str]], level: int = 2) -> str:
    lines = [f"{'#' * level} {title}", "", _line(columns), _line(["---"] * len(columns)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(key: Key) -> list[str]:
    meaning = key.meaning
    if key.facts.only:
        accepted = " or ".join(f"`{_spelled(value)}`" for value in key.facts.only if value not in (None, ""))
        meaning += f" Not in this version: {f'only {accepted} is accepted' if accepted else 'leave it out'}."
    return [f"`{key.name}`", _escaped(key.type), _default(key), key.facts.unit, _escaped(meaning)]


def _seed_row(seed: str, key: Key, required: Collection[str], defaults: Mapping[str, object]) -> list[str]:
    default = f"`{_spelled(defaults[seed])}`" if seed in defaults else _default(key)
    return [f"`{seed}`", f"`{key.name}`", "required" if seed in required else default]


def _default(key: Key) -> str:
    return _escaped(key.facts.by_default) if key.default is None else f"`{_escaped(_spelled(key.default))}`"


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
