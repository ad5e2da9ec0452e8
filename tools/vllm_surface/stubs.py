"""Writes a table as stub files, so that a type checker can compare the connector with a release that is not there."""

from collections import Counter
from pathlib import Path
from typing import Any

from tools.vllm_surface.table import ENUM, STRUCT, Table

ALL = "vllm_surface"
"""Module of all definitions; vllm's own modules take their names from it, so that no import goes in a circle."""

HEAD = "import dataclasses, enum, typing\n"


def write_stubs(table: Table, folder: Path) -> None:
    """Writes the stubs of a release below ``folder``."""
    short = _short_names(table["definitions"])
    lines = [line for name, one in table["definitions"].items() for line in _definition(short[name], one)]
    text = "\n".join(lines)
    # Longest first: a name may begin with another one.
    for name in sorted(short, key=len, reverse=True):
        text = text.replace(name, short[name])
    (folder / f"{ALL}.pyi").write_text(f"{HEAD}{text}\n", encoding="utf-8")
    modules: dict[str, list[str]] = {}
    for module, names in table["names"].items():
        found = modules.setdefault(module, [])
        for name, origin in names.items():
            if origin.endswith(":"):
                modules.setdefault(origin[:-1], [])
                found.append(f"from {module} import {name} as {name}")
            elif origin in short:
                found.append(f"from {ALL} import {short[origin]} as {name}")
            else:
                found.append(f"{name}: {origin}")
    for module in list(modules):
        parts = module.split(".")
        for end in range(1, len(parts)):
            modules.setdefault(".".join(parts[:end]), [])
    for module, found in modules.items():
        path = folder / module.replace(".", "/") / "__init__.pyi"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(found) + "\n", encoding="utf-8")


def _short_names(names: Any) -> dict[str, str]:
    count = Counter(name.rpartition(".")[2] for name in names)
    return {name: last if count[last := name.rpartition(".")[2]] == 1 else name.replace(".", "__") for name in names}


def _definition(name: str, definition: Any) -> list[str]:
    if not isinstance(definition, dict):
        return _member(name, definition)
    bases, members = definition["bases"], definition["members"]
    by_field = definition.get("dataclass", False)
    lines = ["@dataclasses.dataclass(kw_only=True)"] if by_field else []
    lines.append(f"class {name}({', '.join(base for base in bases if base != STRUCT)}):")
    if STRUCT in bases:
        lines.append("    __struct_fields__: tuple[str, ...]")
    if ENUM in bases and "value" not in members.values():
        lines.append("    A_MEMBER = ...")
    elif not by_field and "__init__" not in members and ENUM not in bases and "bytes" not in bases:
        lines.append("    def __init__(self, *args: typing.Any, **kwargs: typing.Any) -> None: ...")
    for member, kind in members.items():
        lines += [f"    {line}" for line in _member(member, kind, " = ..." if by_field else "")]
    return [*lines, "    ..."]


def _member(name: str, kind: str, default: str = "") -> list[str]:
    word, _, rest = kind.partition(" ")
    if kind == "value":
        return [f"{name} = ..."]
    if word == "property":
        return ["@property", f"def {name}(self) -> {rest}: ..."]
    if word in ("classmethod", "staticmethod"):
        return [f"@{word}", f"def {name}{rest.removeprefix('def ')}: ..."]
    if word == "def":
        return [f"def {name}{rest}: ..."]
    return [f"{name}: {kind}{default}"]
