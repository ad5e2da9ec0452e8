"""A release of vLLM or another package as source text: the definitions of its modules, and what names refer to."""

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "vllm"
MODULE = "module"
DEPTH_MAX = 16

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@dataclass
class Module:
    """Definitions and imports at the top of one module, those of ``if TYPE_CHECKING`` and ``try`` included."""

    name: str
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


class Release:
    """The sources of one release, in a wheel or in a folder."""

    def __init__(self, place: Path, package: str = PACKAGE) -> None:
        self.package = package
        self._place = place
        self._parsed: dict[str, Module | None] = {}

    @cached_property
    def _files(self) -> dict[str, str | Path]:
        if self._place.is_dir():
            return {str(path.relative_to(self._place)): path for path in self._place.glob(f"{self.package}/**/*.py")}
        names = [name for name in self._wheel.namelist() if name.startswith(f"{self.package}/")]
        return {name: name for name in names if name.endswith(".py")}

    @cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self._place)

    def trees(self, *folders: str) -> Iterator[tuple[str, ast.Module]]:
        """Yields name and syntax tree of each file below folders."""
        for name, file in sorted(self._files.items()):
            if name.startswith(folders):
                yield name, ast.parse(self._text(file))

    def module(self, name: str) -> Module | None:
        """Returns a module; ``None`` if the release has none of that name."""
        if name not in self._parsed:
            path = name.replace(".", "/")
            file = next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self._files), None)
            self._parsed[name] = None if file is None else self._parse(name, file)
        return self._parsed[name]

    def _parse(self, name: str, file: str) -> Module:
        package = name if file.endswith("/__init__.py") else name.rpartition(".")[0]
        module = Module(name)
        for node in _top(ast.parse(self._text(self._files[file])).body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                module.definitions[node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                module.definitions[node.target.id] = node
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                module.definitions.update(dict.fromkeys(names, node))
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node, package)
                module.imports.update({alias.asname or alias.name: (source, alias.name) for alias in node.names})
            elif isinstance(node, ast.Import):
                module.imports.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
        return module

    def _text(self, file: str | Path) -> str:
        if isinstance(file, Path):
            return file.read_text(encoding="utf-8")
        return self._wheel.read(file).decode()

    def is_own(self, module_name: str) -> bool:
        """Whether a module is one of this package."""
        return module_name == self.package or module_name.startswith(f"{self.package}.")

    def find(self, module_name: str, name: str, depth: int = 0) -> tuple[str, str] | None:
        """Returns where a module's name is defined, as module and name; ``None`` if the module has no such name.

        A name that is a module of vLLM itself comes back as that module and ``MODULE``. A name from elsewhere comes
        back with its own module.
        """
        if not self.is_own(module_name):
            return module_name, name
        if depth > DEPTH_MAX:
            return None
        module = self.module(module_name)  # None for a folder without __init__.py
        if module is not None and name in module.definitions:
            return module_name, name
        if module is not None and name in module.imports:
            source, original = module.imports[name]
            return self.find(source, original, depth + 1) if original else (source, MODULE)
        return (f"{module_name}.{name}", MODULE) if self.module(f"{module_name}.{name}") else None


def _top(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in nodes:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _top([*node.body, *node.orelse])


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])
