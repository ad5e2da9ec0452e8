"""Makes the table of one release: the definitions that the connector uses, with the members that it mentions.

A definition is a class (its bases, and its members' types or signatures), a function's signature, or a value's type.
Types are those that can be told from the sources; everything else is ``Any``. ``None`` is left out of the types of
attributes: whether one may be ``None`` is not what the tables are about.
"""

import ast
from typing import Any

from tools.vllm_surface.fields import fields_of, variables_of
from tools.vllm_surface.sources import DEPTH_MAX, MODULE, Module, Release
from tools.vllm_surface.used import Used

ANY = "typing.Any"
BUILTINS = {"bool", "bytes", "dict", "float", "frozenset", "int", "list", "object", "set", "str", "tuple", "type"}
GENERIC = {"dict", "frozenset", "list", "set", "tuple", "type"}
ABSTRACT = {"Iterable", "Iterator", "Mapping", "Sequence"}
STRUCT = "msgspec.Struct"
ENUM = "enum.Enum"

Table = dict[str, Any]


def table_of(release: Release, version: str, used: Used) -> Table:
    """Returns the table of a release."""
    maker = _Maker(release, used)
    for module, names in sorted(used.imports.items()):
        maker.add_import(module, names)
    maker.add_all()
    table = {"release": version, "names": maker.names, "definitions": dict(sorted(maker.definitions.items()))}
    if fields := fields_of(release):
        table["fields"] = fields
    if variables := variables_of(release):
        table["environment"] = variables
    return table


class _Maker:
    def __init__(self, release: Release, used: Used) -> None:
        self._release, self._used = release, used
        self.names: dict[str, dict[str, str]] = {}
        self.definitions: dict[str, Any] = {}
        self._waiting: list[tuple[str, str]] = []
        self._asked: set[tuple[str, str]] = set()

    def add_import(self, module_name: str, names: set[str]) -> None:
        """Adds what an import gives; what the release lacks is left out."""
        for name in sorted(names):
            found = self._release.find(module_name, name) if name else (module_name, MODULE)
            if found is None or (found[1] == MODULE and self._release.module(found[0]) is None):
                continue
            if found[1] == MODULE:
                if name:
                    self.names.setdefault(module_name, {})[name] = f"{found[0]}:"
                self._add_module(found[0])
            else:
                self.names.setdefault(module_name, {})[name] = self._ask(*found)

    def _add_module(self, module_name: str) -> None:
        """Adds all names of a module that the connector mentions."""
        module = self._release.module(module_name)
        known = self.names.setdefault(module_name, {})
        for name in sorted(self._used.mentioned & ({*module.definitions, *module.imports} if module else set())):
            found = self._release.find(module_name, name)
            if name == "__version__":
                known[name] = "str"
            elif found is not None and found[1] != MODULE and self._release.is_own(found[0]):
                known[name] = self._ask(*found)

    def _ask(self, module: str, name: str) -> str:
        if (module, name) not in self._asked:
            self._asked.add((module, name))
            self._waiting.append((module, name))
        return f"{module}.{name}"

    def add_all(self) -> None:
        """Adds the definitions that were asked for, and those that their types need."""
        while self._waiting:
            module_name, name = self._waiting.pop()
            module = self._release.module(module_name)
            if module is not None:
                self.definitions[f"{module_name}.{name}"] = self._definition(module, name)

    def _definition(self, module: Module, name: str) -> Any:
        node = module.definitions[name]
        if isinstance(node, ast.ClassDef):
            return self._class(module, node)
        if isinstance(node, ast.FunctionDef):
            return self._signature(module, node)
        if isinstance(node, ast.AnnAssign):
            return self._attribute(module, node.annotation)
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "NewType":
            return {"bases": [self._type(module, value.args[1])], "members": {}}
        return ANY

    def _class(self, module: Module, node: ast.ClassDef) -> dict[str, Any]:
        bases = [base for base in (self._base(module, one) for one in node.bases) if base]
        alone = self._used.alone.get(f"{module.name}.{node.name}")
        wanted = self._used.mentioned if alone is None else alone
        members: dict[str, str] = {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if statement.target.id in wanted:
                    members.setdefault(statement.target.id, self._attribute(module, statement.annotation))
            elif isinstance(statement, ast.Assign):
                names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
                members.update(dict.fromkeys(names & wanted, "value" if ENUM in bases else ANY))
            elif isinstance(statement, ast.FunctionDef):
                if statement.name == "__init__" or alone is not None:
                    for name, kind in self._attributes(module, statement, wanted).items():
                        members.setdefault(name, kind)
                if statement.name in wanted:
                    members.setdefault(statement.name, self._method(module, statement))
        found: dict[str, Any] = {"bases": bases, "members": dict(sorted(members.items()))}
        if any("dataclass" in ast.unparse(one) or ast.unparse(one).startswith("config") for one in node.decorator_list):
            found["dataclass"] = True
        return found

    def _base(self, module: Module, node: ast.expr) -> str:
        text = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
        if text in {"Enum", "enum.Enum", "IntEnum", "enum.IntEnum", "StrEnum", "enum.StrEnum", "Flag"}:
            return ENUM
        if text.partition("[")[0] in {"msgspec.Struct", "Struct"}:
            return STRUCT
        found = self._release.find(module.name, text)
        if found is None or not self._release.is_own(found[0]) or found[1] == MODULE:
            return ""
        defined = self._release.module(found[0])
        if defined is None or not isinstance(defined.definitions.get(found[1]), ast.ClassDef):
            return ""
        return self._ask(*found)

    def _attributes(self, module: Module, node: ast.FunctionDef, wanted: set[str]) -> dict[str, str]:
        """Returns what a constructor, or another method of a class that is listed by hand, puts on ``self``."""
        parameters = {one.arg: one.annotation for one in (*node.args.args, *node.args.kwonlyargs)}
        found: dict[str, str] = {}
        for statement in ast.walk(node):
            if isinstance(statement, ast.AnnAssign):
                targets: list[ast.expr] = [statement.target]
            elif isinstance(statement, ast.Assign):
                targets = statement.targets
            else:
                continue
            for target in targets:
                if not (_of_self(target) and isinstance(target, ast.Attribute) and target.attr in wanted):
                    continue
                given: ast.expr | None = None
                if isinstance(statement, ast.AnnAssign):
                    given = statement.annotation
                elif isinstance(statement.value, ast.Name):
                    given = parameters.get(statement.value.id)
                found.setdefault(target.attr, self._attribute(module, given))
        return found

    def _method(self, module: Module, node: ast.FunctionDef) -> str:
        decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
        if decorators & {"property", "cached_property"}:
            return f"property {self._attribute(module, node.returns)}"
        for kind in ("classmethod", "staticmethod"):
            if kind in decorators:
                return f"{kind} {self._signature(module, node)}"
        return self._signature(module, node)

    def _signature(self, module: Module, node: ast.FunctionDef) -> str:
        asked, made = node.args, []
        positional = [*asked.posonlyargs, *asked.args]
        needed = len(positional) - len(asked.defaults)
        for index, one in enumerate(positional):
            made.append(self._parameter(module, one, index >= needed))
        if asked.vararg:
            made.append(f"*{asked.vararg.arg}: {ANY}")
        elif asked.kwonlyargs:
            made.append("*")
        for one, default in zip(asked.kwonlyargs, asked.kw_defaults, strict=True):
            made.append(self._parameter(module, one, default is not None))
        if asked.kwarg:
            made.append(f"**{asked.kwarg.arg}: {ANY}")
        returned = "None" if node.name == "__init__" else self._type(module, node.returns)
        return f"def ({', '.join(made)}) -> {returned}"

    def _parameter(self, module: Module, one: ast.arg, has_default: bool) -> str:
        kind = "" if one.arg in ("self", "cls") else f": {self._type(module, one.annotation)}"
        return f"{one.arg}{kind}{' = ...' if has_default else ''}"

    def _attribute(self, module: Module, node: ast.expr | None) -> str:
        kind = self._type(module, node)
        return " | ".join(side for side in kind.split(" | ") if side != "None") or ANY

    def _type(self, module: Module, node: ast.expr | None) -> str:
        if node is None:
            return ANY
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                try:
                    return self._type(module, ast.parse(node.value, mode="eval").body)
                except SyntaxError:
                    return ANY
            return "None" if node.value is None else ANY
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [self._type(module, side) for side in (node.left, node.right)]
            return ANY if ANY in sides else " | ".join(dict.fromkeys(sides))
        if isinstance(node, ast.Subscript):
            return self._subscript(module, node)
        if isinstance(node, ast.Name):
            return self._name(module, node.id)
        return ANY

    def _subscript(self, module: Module, node: ast.Subscript) -> str:
        outer = ast.unparse(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in {"ClassVar", "Annotated", "Final"}:
            return self._type(module, inner[0])
        if outer == "Optional":
            kind = self._type(module, inner[0])
            return ANY if kind == ANY else f"{kind} | None"
        if outer in GENERIC or outer in ABSTRACT:
            parts = ["..." if ast.unparse(one) == "..." else self._type(module, one) for one in inner]
            return f"{outer if outer in GENERIC else 'typing.' + outer}[{', '.join(parts)}]"
        return ANY

    def _name(self, module: Module, name: str) -> str:
        found = self._release.find(module.name, name)
        if found is None:
            return name if name in BUILTINS else ANY
        defined = self._release.module(found[0]) if self._release.is_own(found[0]) else None
        node = defined.definitions.get(found[1]) if defined is not None else None
        if not isinstance(node, ast.ClassDef) or not self._is_used(found[0], node):
            return ANY
        return self._ask(*found)

    def _is_used(self, module_name: str, node: ast.ClassDef, depth: int = 0) -> bool:
        """Whether the connector mentions a member of a class: of other classes it cannot use anything."""
        names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
        names |= {target.id for target in fields if isinstance(target, ast.Name)}
        if names & self._used.mentioned - {"__init__"}:
            return True
        for base in node.bases if depth < DEPTH_MAX else ():
            found = self._release.find(module_name, ast.unparse(base))
            defined = self._release.module(found[0]) if found is not None and self._release.is_own(found[0]) else None
            inner = defined.definitions.get(found[1]) if defined is not None and found is not None else None
            if isinstance(inner, ast.ClassDef) and found is not None and self._is_used(found[0], inner, depth + 1):
                return True
        return False


def _of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
